-- peek.lua: look at who has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV identity
-- returns {run, where}: where it is: waiting, coming, running or ended | {}: nobody has it
-- USES grant calls

local entry = redis.call('HGET', CALLS, ARGV[1])
if not entry then
    return {}
end
local run, where = taken_by(entry, microseconds() / 1000)
return run and { run, where } or {}
