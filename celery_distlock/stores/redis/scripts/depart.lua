-- depart.lua: let a run that needs several keys, and has all of them kept for it, stand no longer;
-- at the first one it is put on its way, the last of all.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run first
-- returns 0 the key is not kept for it | 1 it has left the queue | as queue.lua's `reply`: it has to be
--         sent
--
-- first  1: the key is the first one, where its envelope lies
-- USES grant units queue

local run, first = unpack(ARGV)
local now = microseconds()
prune(now)
if not keeps_for(run) then
    return 0
end
depart(now, run, first == '1')
return answer(1)
