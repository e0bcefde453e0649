-- index.lua: remove a name from the index of keys at which runs may be parked, if no run was for a minute.
-- KEYS parked
-- ARGV name
-- returns 1 removed | 0 left
--
-- The index is in another slot than the key, so it cannot be written with the queue: a name is added,
-- with 0, before its run is parked. It goes when it is found for the second time where no run is, and
-- was not added since the first, which was long ago.

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
    redis.call('ZREM', KEYS[1], '') -- a full server refuses a script's first write, but not this one
    redis.call('ZADD', KEYS[1], 'XX', now_ms, ARGV[1])
end
return 0
