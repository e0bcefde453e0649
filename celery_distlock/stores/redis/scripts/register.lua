-- register.lua: register a delivery channel that receives woken runs of a broker queue, or remove it.
-- KEYS until free
-- ARGV address slots for_ms
-- returns nothing
--
-- until    zset  channels, by the time (ms) until which they count as alive
-- free     zset  channels, by the number of tasks that their worker could start now
-- for_ms   0: remove it

local UNTIL, FREE = KEYS[1], KEYS[2]
local KEPT_MS = 60000 -- after the last registration
local GONE = 100 -- expired channels removed at a time
local address, slots, for_ms = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function remove(channel)
    redis.call('ZREM', UNTIL, channel)
    redis.call('ZREM', FREE, channel)
end

remove(address) -- first: a full server does not refuse ZREM
for _, channel in ipairs(redis.call('ZRANGEBYSCORE', UNTIL, '-inf', now_ms, 'LIMIT', 0, GONE)) do
    remove(channel)
end
if for_ms ~= '0' then
    redis.call('ZADD', UNTIL, now_ms + for_ms, address)
    redis.call('ZADD', FREE, slots, address)
    redis.call('PEXPIRE', UNTIL, KEPT_MS)
    redis.call('PEXPIRE', FREE, KEPT_MS)
end
