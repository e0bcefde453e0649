-- reserve_kept.lua: turn a kept grant into a reservation, when a run has all of its keys, which are in
-- different slots. At the first key, which must be the last call, the run is sent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run number comes
-- returns 0 the key is not kept for it | 1 reserved | a `reply` (answers.lua): reserved, and the run must
--         be sent
--
-- number  of the key; the first has the envelope
-- comes   1: the run is here, and takes its keys itself
-- USES records grants limits rates gates runs answers queue several

local run, number, comes = unpack(ARGV)
-- NEVER REFUSED
look('', run)
fetch('limit', 'turn', 'r:' .. run, 'e:' .. run)
local kept, of = grant_for(run), record(run)
if not kept then
    return 0
elseif kept.stage == KEPT and of then
    reserve_here(run, tonumber(of.p), want_in(of.w), claim_ms())
end
if number ~= '1' then
    if of and of.s == 'kept' then
        forget_run(run) -- else it is queued here until it is in flight
    end
elseif of and not is_in_woken(of.s) then
    of.at, of.v, of.f = nil, nil, nil
    go(run, of, 'woken', now_ms + UNSENT_MS)
    if comes ~= '1' then
        send(run, of, field('e:' .. run))
    end
end
hand_on_here()
return answer(1)
