-- try_key.lua: try one of several keys of a run that are in different slots: keep it for some seconds, or
-- queue the run there. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run route_text number arrival owner counts [envelope channel]
-- returns a `reply` (answers.lua) with status: busy: it is in flight | done: it has ended or is unknown |
--         reserved or parked, with the fields of try_keys.lua, waits: it is queued here, and aged: it has
--         failed often enough to have other keys kept
--
-- number   of the key. The first has the envelope, and the run is queued there until it waits elsewhere
-- arrival  its place in all queues, from the answer at the first key; there: its arrival (µs), or 0
-- owner    an owner that holds the key for the run and releases it now, or empty
-- counts   1: one of its keys has opened, so being refused counts as a failed attempt
-- USES records grants limits rates gates runs answers queue several

local TRY_MS = 5000 -- in which the other keys are tried
local run, route_text, number, arrival, owner, counts, envelope, channel = unpack(ARGV)
number = tonumber(number)
read_route(route_text)
local want = route.wants[number]
local of, place -- the run's record, and its place
look(owner, run)
fetch('limit', 'turn', 'r:' .. run)
of, place = record(run), tonumber(arrival)

local gone = number == 1 and status_of_gone(run, of, envelope)
if gone then
    return reply({ status = gone })
end
arrival = give_up(owner) or arrival
if number == 1 then
    of = of or {}
    place = place_record(of, arrival, envelope, channel)
    if of.s ~= 'elsewhere' or envelope then
        go(run, of, 'waiting', nil, envelope)
    end
end
local is_closed = refuses(run, place, want)
if not is_closed then
    keep_here(run, place, want, TRY_MS, true)
    is_closed = not grant_for(run)
end
if is_closed and number > 1 then
    go(run, entry_of(run, place, want, 'waiting'), 'waiting')
elseif is_closed and of.s == 'elsewhere' then
    of.at = nil
    count_turn(of, counts)
    go(run, of, 'waiting')
end
hand_on_here()
local facts, waits = facts_here(run, place, is_closed)
facts.waits = waits
facts.aged = of ~= nil and not of.b and is_aged(of)
return reply(facts)
