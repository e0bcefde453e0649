-- downgrade.lua: have one share with any number what it had alone; or wait no more to have it alone.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms
-- returns {'granted', token, slot}: it shares the key | as queue.lua's `reply`: it does, and the next are
--         let in; or with the status free: it has nothing of the key
-- USES grant units queue

local owner, lease_ms = unpack(ARGV)
local now = microseconds()
prune(now)
local held = redis.call('HMGET', LOCK, 'owner', 'run', 'token', 'again', 'up', 'was')
local slot = -1
local token, up = held[3], held[5]
if held[1] == owner then
    local run, again, was = held[2], held[4], held[6]
    local left_ms = math.max(redis.call('PTTL', LOCK), tonumber(lease_ms))
    local units, its_slot, of = string.match(was or '', '^(%d+) (%-?%d+) (%d+)$')
    begin_to_write()
    keep_only('owner', 'token', 'run', 'rest', 'start:' .. owner)
    token, slot = admit(now, owner, run, left_ms, tonumber(units or 1), 0, 0)
    if units then -- it has what it had before it was alone
        local share = share_of(owner)
        share.units, share.slot = tonumber(units), tonumber(its_slot)
        slot = share.slot
        write_share(owner, share)
        local slots = marked('', slot, '1')
        redis.call('HSET', LOCK, 'used', units, 'slots', slots, 'capacity', of)
    end
    if again then
        redis.call('HSET', LOCK, 'again:' .. run, again)
    end
    outlive_rest(now)
elseif held[1] ~= SHARED or not share_of(owner) then
    return reply({ status = 'free' })
else
    slot = share_of(owner).slot
end
if upgrading(up) == owner then
    redis.call('HDEL', LOCK, 'up')
end
hand_on(now, '', 0)
return answer_granted(token, slot)
