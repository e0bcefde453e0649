-- channels.lua: list delivery channels that receive woken runs of a broker queue (register.lua).
-- KEYS until free
-- ARGV most near
-- returns {address, slots, ...}: of the addresses `near`, then of the channels with the most free slots
--
-- most     how many channels are listed in addition to those near
-- near     addresses, separated by spaces

local UNTIL, FREE = KEYS[1], KEYS[2]
local most, near = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local found = {}
local function add(channel)
    local until_ms, idle = redis.call('ZSCORE', UNTIL, channel), redis.call('ZSCORE', FREE, channel)
    if until_ms and idle and tonumber(until_ms) > now_ms then
        found[#found + 1] = channel
        found[#found + 1] = idle
    end
end
for channel in string.gmatch(near, '%S+') do
    add(channel)
end
for _, channel in ipairs(redis.call('ZRANGE', FREE, 0, most - 1, 'REV')) do
    add(channel)
end
return found
