-- leave_key.lua: have a run of several keys, which are in different places, wait at this one no longer, and
-- give back what is kept for it here. It waits at another one.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run number at counts keeps owner
-- returns 0 it is not there | 1 it has left | as queue.lua's `reply`: and the next are let in
--
-- number  of the key
-- at      the name of the key at which it waits; empty: it is on its way
-- counts  1: one of its keys had opened, and that it was turned away counts
-- keeps   1: what is kept for it here is kept on
-- owner   which holds the key for the run, and gives it up so, or empty
-- USES records grants limits rates gates runs answers queue several

local run, number, at, counts, keeps, owner = unpack(ARGV)
-- NEVER REFUSED
look(owner, run)
local of = record(run)
give_up(owner)
if not of then
    hand_on_here()
    return answer(0)
end
if keeps == '1' then
    keep_here(run, tonumber(of.p), want_in(of.w), KEPT_MS)
else
    leave_here(run, at ~= '')
end
if number == '1' and (of.s == 'waiting' or of.s == 'elsewhere') then
    key.is_left = key.is_left or of.s == 'waiting'
    if of.at ~= at then
        count_turn(of, counts)
    end
    of.at = at
    go(run, of, 'elsewhere')
end
hand_on_here()
return answer(1)
