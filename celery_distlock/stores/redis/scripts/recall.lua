-- recall.lua: ask a holder to leave. It learns of that by its next renewal. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner
-- returns 1 asked | 0 the owner has no grant
-- USES records grants

local owner = ARGV[1]
read_clock()
load(owner, '')
local grant = grant_of(owner)
if not grant or grant.ends <= now_ms then
    return 0
end
flag(grant, RECALLED, clock)
return 1
