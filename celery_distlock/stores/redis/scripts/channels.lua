-- channels.lua: note that a channel takes woken runs of a broker's queue; tell which ones do.
-- KEYS until free
-- ARGV address slots for_ms most near
-- returns {address, slots, ...}: of the addresses `near`, then of those that have most free slots
--
-- until    zset  channels, by the time (ms) until which they are taken for alive
-- free     zset  the same, by how many more tasks their workers could start now
-- address  empty: note nothing
-- for_ms   0: it takes no more
-- most     how many are told, besides those that are near
-- near     addresses, with a blank between

local UNTIL, FREE = KEYS[1], KEYS[2]
local KEPT_MS = 60000 -- after the last note
local GONE = 100 -- at most are struck at a time
local address, slots, for_ms, most, near = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function strike(channel)
    redis.call('ZREM', UNTIL, channel)
    redis.call('ZREM', FREE, channel)
end

if address ~= '' then
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
end

local found = {}
local function tell(channel)
    local until_ms, idle = redis.call('ZSCORE', UNTIL, channel), redis.call('ZSCORE', FREE, channel)
    if until_ms and idle and tonumber(until_ms) > now_ms then
        found[#found + 1] = channel
        found[#found + 1] = idle
    end
end
for channel in string.gmatch(near, '%S+') do
    tell(channel)
end
for _, channel in ipairs(redis.call('ZRANGE', FREE, 0, most - 1, 'REV')) do
    tell(channel)
end
return found
