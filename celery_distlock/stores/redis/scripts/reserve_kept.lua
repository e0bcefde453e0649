-- reserve_kept.lua: reserve for a run a key that is kept for it, as it has all of its keys, which are in
-- different places; at the first one it is put on its way, the last of all.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run number comes
-- returns 0 the key is not kept for it (any more) | 1 it is reserved | as queue.lua's
--         `reply`: likewise, and it is to be sent
--
-- number  of the key; at the first one its envelope lies
-- comes   1: the run is here, and takes its keys itself
-- USES records grants limits rates gates runs answers queue several

local run, number, comes = unpack(ARGV)
-- NEVER REFUSED
look('', run)
fetch('limit', 'r:' .. run, 'e:' .. run)
local kept, of = grant_for(run), record(run)
if not kept then
    return 0
elseif kept.stage == KEPT and of then
    reserve_here(run, tonumber(of.p), want_in(of.w), claim_ms())
end
if number ~= '1' then
    if of and of.s == 'kept' then
        forget_run(run) -- else it waits here until it is on its way
    end
elseif of and not is_in_woken[of.s] then
    of.at, of.v, of.f = nil, nil, nil
    go(run, of, 'woken', now_ms + UNSENT_MS)
    if comes ~= '1' then
        send(run, of, field('e:' .. run))
    end
end
hand_on_here()
return answer(1)
