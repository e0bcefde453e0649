-- drop.lua: forget a run that is on its way and will not run, or whose end is known to all.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run mark
-- returns 1 forgotten | 0 nothing is known of it (any more) | {wake_run, wake_envelope}: forgotten,
--         and the next is to be sent
--
-- mark  1: a second delivery that comes later is to be recognised
-- USES records grants limits rates gates runs answers queue

local run, mark = unpack(ARGV)
-- NEVER REFUSED
look('', run)
local reserved, of = grant_for(run), record(run)
local ended, settles = ends_of(run)
if not (reserved or (settles and not ended) or (of and is_in_woken[of.s])) then
    return 0
end
forget_run(run)
strike('p:' .. run) -- it had stepped back
if mark == '1' then
    record_end(run)
end
free(reserved)
if of and of.k and not of.b then
    note_woken(run, '', { route = of.k, givers = '' }) -- for its other keys
end
return answer(1)
