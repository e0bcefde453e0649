-- identities.lua: look at who has which identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV limit
-- returns {identity, run, where, ...}: some, at most so many, in no order; where it is as in identity.lua
-- USES grant calls

local limit = tonumber(ARGV[1])
local now_ms = microseconds() / 1000
local found = {}
local entries = redis.call('HSCAN', CALLS, 0, 'COUNT', limit)[2]
for i = 1, #entries, 2 do
    local run, where = taken_by(entries[i + 1], now_ms)
    if run and #found < 3 * limit then
        for _, each in ipairs({ entries[i], run, where }) do
            found[#found + 1] = each
        end
    end
end
return found
