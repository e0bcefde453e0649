-- channels.lua: tell which delivery channels take woken runs of a broker's queue, as register.lua noted.
-- KEYS until free
-- ARGV most near
-- returns {address, slots, ...}: of the addresses `near`, then of those that have most free slots
--
-- most     how many are told, besides those that are near
-- near     addresses, with a blank between

local UNTIL, FREE = KEYS[1], KEYS[2]
local most, near = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

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
