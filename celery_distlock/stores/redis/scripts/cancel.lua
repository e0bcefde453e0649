-- cancel.lua: strike a parked run that has not come to its key: it will not run.
-- KEYS lock queue tasks woken fence done rate later
-- ARGV run
-- returns 1 struck | 0 it is not parked, or has come | {wake_run, wake_envelope}: struck, and the
--         next is to be sent
--
-- USES grant
-- USES units
-- USES queue
local LATER = KEYS[8]
local run = ARGV[1]
local now = microseconds()
prune(now)
if holds(run, now) or redis.call('ZSCORE', DONE, '~' .. run) then
    return 0 -- it runs, or its result is being stored
end
if not unpark(run) then
    return 0
end
redis.call('ZREM', LATER, run)
record_end(run)
return free('parked:' .. run)
