-- sent.lua: a woken run's message is with the broker: send it again only if it does not come. Or it
-- came back unfinished: send it again at the next sweep.
-- KEYS lock queue tasks woken fence done
-- ARGV run again
-- returns 1 noted | 0 it has come already
--
-- again  1: it came back
--
-- USES grant
-- USES queue
local run, again = unpack(ARGV)
if not redis.call('ZSCORE', WOKEN, run) then
    return 0
end
if again == '1' then
    redis.call('ZREM', DONE, '~' .. run)
    redis.call('ZADD', WOKEN, 'XX', 0, run)
    return 1
end
local times = redis.call('HINCRBY', TASKS, 'n:' .. run, 1)
local pause = times <= RESENDS and RESEND_MS * 2 ^ (times - 1) or DAY_MS
local due = microseconds() / 1000 + pause
redis.call('ZADD', WOKEN, 'XX', integer(due), run)
return 1
