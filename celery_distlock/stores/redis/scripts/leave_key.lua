-- leave_key.lua: remove a run of several keys in different slots from this key, because it waits at
-- another one or is in flight; release what is kept for it here.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run number at counts keeps owner
-- returns 0 it is not here | 1 removed | a `reply` (answers.lua): removed, and waiters are served
--
-- number  of the key
-- at      the name of the key where it waits; empty: it is in flight
-- counts  1: one of its keys has opened, so this counts as a failed attempt
-- keeps   1: keep this key for it
-- owner   an owner that holds the key for the run and releases it now, or empty
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
