-- register.lua: note that a delivery channel takes woken runs of a broker's queue, or does no more.
-- KEYS until free
-- ARGV address slots for_ms
-- returns nothing
--
-- until    zset  channels, by the time (ms) until which they are taken for alive
-- free     zset  the same, by how many more tasks their workers could start now
-- for_ms   0: it takes no more

local UNTIL, FREE = KEYS[1], KEYS[2]
local KEPT_MS = 60000 -- after the last note
local GONE = 100 -- at most are struck at a time
local address, slots, for_ms = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function strike(channel)
    redis.call('ZREM', UNTIL, channel)
    redis.call('ZREM', FREE, channel)
end

strike(address) -- first: a full server refuses a script's first write, but not this one
for _, channel in ipairs(redis.call('ZRANGEBYSCORE', UNTIL, '-inf', now_ms, 'LIMIT', 0, GONE)) do
    strike(channel)
end
if for_ms ~= '0' then
    redis.call('ZADD', UNTIL, now_ms + for_ms, address)
    redis.call('ZADD', FREE, slots, address)
    redis.call('PEXPIRE', UNTIL, KEPT_MS)
    redis.call('PEXPIRE', FREE, KEPT_MS)
end
