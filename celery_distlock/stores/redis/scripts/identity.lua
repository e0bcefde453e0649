-- identity.lua: look up which run has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV identity
-- returns fields as JSON, none if no run has it: run; where it is: waiting, coming, running or ended;
--         expires_ms, after which it loses the identity if it has not begun; marks (calls.lua);
--         lasts_ms, for which it keeps it in any case
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
