-- drop.lua: forget a run that is on its way and will not run, or whose end is known to all.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run mark
-- returns 1 forgotten | 0 nothing is known of it | as queue.lua's `reply`: forgotten, and the next has
--         to be sent
--
-- mark  1: a second delivery that comes later is to be recognised
-- USES grant units queue

local run, mark = unpack(ARGV)
prune(microseconds())
local reserved = keeps_for(run)
if
    not reserved
    and not redis.call('ZSCORE', WOKEN, run)
    and not redis.call('ZSCORE', DONE, '~' .. run)
then
    return 0
end
unpark(run)
if mark == '1' then
    record_end(run)
end
free('parked:' .. run)
return answer(1)
