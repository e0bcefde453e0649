-- resend_all.lua: make due at once what is on its way, as if it had not been sent yet.
-- KEYS lock queue tasks woken fence done rate
-- ARGV limit
-- returns how many were made due
--
-- Not those that have come: who runs, or whose result is being stored.
-- USES grant units lining

local now = microseconds()
prune(now)
local roused = 0
for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, ARGV[1] - 1)) do
    if not holds(run, now) and not redis.call('ZSCORE', DONE, '~' .. run) then
        redis.call('ZADD', WOKEN, 'XX', 0, run)
        if not is_with_broker(run) then
            redis.call('HDEL', TASKS, 'd:' .. run)
        end
        note_sent(run, 0)
        roused = roused + 1
    end
end
return roused
