-- identities.lua: list identities and their runs, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV limit
-- returns identities as JSON: at most `limit`, in no order; of each identity, run, and where it is, as in
--         identity.lua
-- USES records grants runs calls

local most = tonumber(ARGV[1])
read_clock()
load('', '')
local found = {}
local entries = redis.call('HSCAN', CALLS, 0, 'COUNT', most)[2]
for i = 1, #entries, 2 do
    local run, where = taken_by(entries[i + 1])
    if run and #found < most then
        found[#found + 1] = { identity = entries[i], run = run, where = where }
    end
end
return named({ identities = found })
