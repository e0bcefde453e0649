-- coming.lua: the usual way to come for a key that was handed over, to be had alone. It does what the
-- rest of acquire.lua would, in half the time.
-- KEYS lock queue tasks woken fence done rate

-- Returns the token of a key that is kept for a run, or was handed to an owner; nothing if it is not.
-- Who waits in the queue for it as `waiter` (empty: nobody) waits no more.
local function come_for_it(owner, run, lease_ms, waiter)
    local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run', 'rated', 'rest')
    local holder, token, for_run = held[1], held[2], held[3]
    if held[4] or held[5] then
        return nil -- its start is to be counted, or the record is to live until the key has rested
    elseif holder == owner and for_run == run then
        lengthen(lease_ms)
        redis.call('HDEL', LOCK, 'due')
        return token
    elseif run ~= '' and holder == 'parked:' .. run then
        redis.call('PEXPIRE', LOCK, lease_ms) -- first: a full server refuses what begins with HSET
        redis.call('HSET', LOCK, 'owner', owner)
        redis.call('HDEL', LOCK, 'due', 'from:' .. run)
        unpark(run)
        if waiter ~= '' then
            redis.call('ZREM', QUEUE, waiter)
        end
        return token
    end
    return nil
end
