-- leaving.lua: note when a run leaves its queue, if it waits then. Called before the run is queued, so
-- that it never waits without that. Idempotent.
-- KEYS leaving
-- ARGV run in_ms
-- returns 1
--
-- leaving  zset  runs, by the time (ms) when they leave the queue; some have left it already

local KEPT_MS = 2678400000 -- after the last of them, if no worker runs
local run, in_ms = unpack(ARGV)
local time = redis.call('TIME')
local at_ms = time[1] * 1000 + math.floor(time[2] / 1000) + in_ms
redis.call('ZADD', KEYS[1], string.format('%.0f', at_ms), run)
if redis.call('PTTL', KEYS[1]) < in_ms + KEPT_MS then
    redis.call('PEXPIRE', KEYS[1], string.format('%.0f', in_ms + KEPT_MS))
end
return 1
