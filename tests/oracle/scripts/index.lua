-- index.lua: note that somebody may be parked at a key, or strike it when nobody was for a minute.
-- KEYS parked
-- ARGV name action
-- returns 1 noted or struck | 0 left alone
--
-- The index is in another slot than the key, so it cannot be written with the queue: a name is
-- added before its task is parked, and goes only when it is older than any request can be.

local STALE_MS = 60000
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
if ARGV[2] == 'add' then
    redis.call('ZADD', KEYS[1], now_ms, ARGV[1])
    return 1
end
local noted = redis.call('ZSCORE', KEYS[1], ARGV[1])
if noted and tonumber(noted) <= now_ms - STALE_MS then
    return redis.call('ZREM', KEYS[1], ARGV[1])
end
return 0
