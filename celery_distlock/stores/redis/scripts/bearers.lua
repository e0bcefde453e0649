-- bearers.lua: look at who has which identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV limit
-- returns bearers as JSON: at most `limit` of them, in no order; of each identity, run, and where it
--         is, as in peek.lua
-- USES grant calls

local limit = tonumber(ARGV[1])
local now_ms = microseconds() / 1000
local found = {}
local entries = redis.call('HSCAN', CALLS, 0, 'COUNT', limit)[2]
for i = 1, #entries, 2 do
    local run, where = taken_by(entries[i + 1], now_ms)
    if run and #found < limit then
        found[#found + 1] = { identity = entries[i], run = run, where = where }
    end
end
return named({ bearers = found })
