-- identity.lua: look up which run has an identity, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV identity
-- returns nothing if no run has it, else {run, where, marks, lasts_ms, expires_ms}: where it is: waiting,
--         coming, running or ended; its marks (calls.lua); for how long it keeps it in any case; and, if
--         it expires, after which time it loses the identity if it has not begun
-- USES records grants runs calls

local entry = redis.call('HGET', CALLS, ARGV[1])
if not entry then
    return nil
end
read_clock()
load('', '')
local run, where, expires_ms, marks = taken_by(entry)
if not run then
    return nil
end
local until_ms = math.min(EXACT, tonumber(string.match(entry, '^(%d+)')) or 0)
local lasts_ms = math.max(0, math.floor(until_ms - now_ms))
local left_ms = expires_ms < math.huge and math.ceil(math.min(EXACT, expires_ms) - now_ms) or nil
return { run, where, marks, lasts_ms, left_ms }
