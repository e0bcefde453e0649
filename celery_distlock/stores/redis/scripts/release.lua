-- release.lua: give the key up, or a place in its queue, and hand the key to the next waiter.
-- KEYS lock queue tasks woken fence done
-- ARGV owner run ended [inbox keep_run keep_ms]
-- returns 1 given up | 0 was not ours | {wake_run, wake_envelope}: given up, and to be sent
--
-- ended     0: the run has not ended (its process is being killed, its message goes back).
--           1: it has; a second delivery of it that is parked is dropped.
--           2: it has, and a second delivery that comes later is to be recognised.
--           3: its body has, and its result is not stored yet: a second delivery is held back.
-- inbox     where a blocked waiter that gives up had waited, else empty
-- keep_ms   not 0: the key stays locked for so long, for keep_run to claim
--
-- USES grant
local owner, run, ended, inbox, keep_run, keep_ms = unpack(ARGV)
inbox, keep_ms = inbox or '', keep_ms or '0'

if tonumber(ended) < 2 and keep_ms == '0' and redis.call('EXISTS', QUEUE, TASKS) == 0 then
    -- Nobody waits, nothing is to be noted: most releases end here.
    local held = redis.call('HMGET', LOCK, 'owner', 'again')
    if held[1] ~= owner then
        return 0
    end
    if not held[2] then
        redis.call('DEL', LOCK)
        return 1
    end
end

-- USES queue
givers = run

if run ~= '' and ended == '3' then
    hold_back(run)
elseif run ~= '' and ended ~= '0' then
    local parked = unpark(run)
    if parked or ended == '2' or redis.call('HEXISTS', LOCK, 'again') == 1 then
        record_end(run)
    end
end
if inbox ~= '' then
    redis.call('ZREM', QUEUE, 'b:' .. inbox .. ' ' .. owner)
end
if redis.call('HGET', LOCK, 'owner') ~= owner then
    return 0
end
if keep_ms ~= '0' then
    redis.pcall('HSET', LOCK, 'owner', 'parked:' .. keep_run, 'run', keep_run)
    redis.call('PEXPIRE', LOCK, keep_ms)
    return 1
end
return free()
