-- drop.lua: forget a run in flight that will not run, or whose end is already recorded.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run mark
-- returns 1 forgotten | 0 it is not known | a `reply` (answers.lua): forgotten, and the next run must be sent
--
-- mark  1: a later second delivery must be recognised
-- USES records grants limits rates gates runs answers queue

local run, mark = unpack(ARGV)
-- NEVER REFUSED
look('', run)
fetch('turn', 'r:' .. run)
local reserved, of = grant_for(run), record(run)
local ended, settles, _, recalled = ends_of(run)
if not (reserved or ((settles or recalled) and not ended) or (of and is_in_woken(of.s))) then
    return 0
end
forget_run(run)
remove_waiter('p:' .. run) -- it had been queued again
if mark == '1' then
    record_end(run)
end
free(reserved)
if of and of.k and not of.b then
    note_route(run, of) -- for its other keys
end
return answer(1)
