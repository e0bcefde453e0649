-- limit.lua: set an operator's limit, or take it back, and let those in who fit then.
-- KEYS lock queue tasks woken fence done rate
-- ARGV capacity until_ms author
-- returns 1 | {wake_run, wake_envelope, ...}: and to be sent
--
-- capacity  empty: take it back
-- until_ms  0: without an end
--
-- USES grant
-- USES units
-- USES queue
local capacity, until_ms, author = unpack(ARGV)
local now = microseconds()
prune(now)
if capacity == '' then
    redis.call('HDEL', TASKS, 'limit')
else
    local since = integer(now)
    redis.call('HSET', TASKS, 'limit', table.concat({ capacity, until_ms, since, author }, ' '))
end
return go_on(now)
