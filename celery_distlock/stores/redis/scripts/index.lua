-- index.lua: remove a name from the index of keys with parked runs, if none was parked for a minute.
-- KEYS parked
-- ARGV name
-- returns 1 removed | 0 left
--
-- The index is in another slot than the key, so it is not written together with the queue: a name is added
-- with score 0 before its run is parked. The first sweep that finds no run sets the time, the second
-- removes the name, unless it was added again, or less than a minute has passed.

local STALE_MS = 60000
local noted = redis.call('ZSCORE', KEYS[1], ARGV[1])
if not noted then
    return 0
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if tonumber(noted) > 0 and tonumber(noted) <= now_ms - STALE_MS then
    return redis.call('ZREM', KEYS[1], ARGV[1])
elseif noted == '0' then
    redis.call('ZREM', KEYS[1], '') -- first: a full server does not refuse ZREM
    redis.call('ZADD', KEYS[1], 'XX', now_ms, ARGV[1])
end
return 0
