-- peek.lua: look at who has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV identity
-- returns {run, where}: where it is: waiting, coming, running or ended | {run, where, expires_ms,
--         marks}: likewise; in how many ms it expires if it has not begun, or empty; the marks as in
--         calls.lua | {}: nobody has it
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
if marks == '' and expires_ms == math.huge then
    return { run, where }
end
local left_ms = expires_ms < math.huge and math.ceil(expires_ms - now_ms) or ''
return { run, where, left_ms, marks }
