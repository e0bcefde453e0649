-- identity.lua: look at who has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV identity
-- returns {run, where}: where it is: waiting, coming, running or ended | {run, where, expires_ms,
--         marks, lasts_ms}: likewise; in how many ms it expires if it has not begun, or empty; the
--         marks as in calls.lua; for how many it has it whatever becomes of it | {}: nobody has it
-- USES grant calls

local entry = redis.call('HGET', CALLS, ARGV[1])
if not entry then
    return {}
end
local now_ms = microseconds() / 1000
local run, where, expires_ms, marks = taken_by(entry, now_ms)
if not run then
    return {}
end
local lasts_ms = math.max(0, math.floor((tonumber(string.match(entry, '^(%d+)')) or 0) - now_ms))
if marks == '' and expires_ms == math.huge and lasts_ms == 0 then
    return { run, where }
end
local left_ms = expires_ms < math.huge and math.ceil(expires_ms - now_ms) or ''
return { run, where, left_ms, marks, lasts_ms }
