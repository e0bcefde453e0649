-- identity.lua: look at who has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV identity
-- returns fields as JSON, none if no run has it: run, and where it is: waiting, coming, running or
--         ended; expires_ms, after which it has none if it has not begun; marks, as in calls.lua;
--         lasts_ms, for which it has it in any case
-- USES records grants runs calls

local entry = redis.call('HGET', CALLS, ARGV[1])
if not entry then
    return '{}'
end
read_clock()
load('', '')
local run, where, expires_ms, marks = taken_by(entry)
if not run then
    return '{}'
end
local lasts_ms = math.max(0, math.floor((tonumber(string.match(entry, '^(%d+)')) or 0) - now_ms))
local left_ms = expires_ms < math.huge and math.ceil(expires_ms - now_ms) or nil
return named({ run = run, where = where, expires_ms = left_ms, marks = marks, lasts_ms = lasts_ms })
