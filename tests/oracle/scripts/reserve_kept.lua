-- reserve_kept.lua: let a run that needs several keys, and has all of them kept for it, stand no longer;
-- at the first one it is put on its way, the last of all.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run first
-- returns 0 the key is not kept for it (any more) | 1 it stands there no longer |
--         {wake_run, wake_envelope}: likewise, and it is to be sent
--
-- first  1: the key is the first one, where its envelope lies
-- USES grant units queue

local run, first = unpack(ARGV)
local now = microseconds()
prune(now)
if not keeps_for(run) then
    return 0
end
local wake_run, wake_envelope = depart(now, run, first == '1')
return wake_run == '' and 1 or { wake_run, wake_envelope }
