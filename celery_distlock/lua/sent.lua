-- sent.lua: a woken run's message is with the broker; send it again only if it does not come.
-- USES queue
-- KEYS lock queue tasks woken fence done
-- ARGV run
-- returns 1 noted | 0 it has come already
local run = ARGV[1]
if not redis.call('ZSCORE', WOKEN, run) then
    return 0
end
local times = math.min(redis.call('HINCRBY', TASKS, 'n:' .. run, 1), 7)
local again = microseconds() / 1000 + RESEND_MS * 2 ^ (times - 1)
redis.call('ZADD', WOKEN, 'XX', integer(again), run)
return 1
