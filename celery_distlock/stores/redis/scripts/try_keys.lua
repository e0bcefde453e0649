-- try_keys.lua: reserve all keys of a run, or queue it at the key that refuses it. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run route_text counts comes arrival owners gave [envelope channel]
-- returns a `reply` (answers.lua) with opens: for each key that time alone opens, its number and in how
--         many ms; and status: busy: it is in flight | done: it has ended or is unknown | reserved: all
--         keys are reserved | parked, with the fields below
--
-- at      the number of the key where it waits; holder: owner of a grant there, with its run, its token,
--         and ttl_ms
-- place   number of waiters ahead there
-- since   arrival (µs)
--
-- The keys are the records of each key in turn. The first key has the envelope.
--
-- route_text all of its keys: Route.written()
-- counts   1: one of its keys has opened, so being refused counts as a failed attempt
-- comes    1: the run is here, and takes reserved keys itself
-- arrival  (µs), or 0
-- owners   owners that hold keys for the run and release them now, separated by spaces; -: none
-- gave     the runs that released a key for it, one a line
-- USES records grants limits rates gates runs answers queue several

local run, route_text, counts, comes, arrival, owners, gave, envelope, channel = unpack(ARGV)
givers = gave
local asking = {}
for owner in string.gmatch(owners, '%S+') do
    asking[#asking + 1] = owner
end
read_route(route_text)
local all, place, home = #KEYS / RECORDS, 0, nil

-- Calls a function for each key, the first key last.
local function at_each(act)
    for number = all, 1, -1 do
        turn_to(number)
        act(number)
    end
end

local function look_at(number)
    load(asking[number] or '', run)
    prune()
    fetch('limit', 'turn', 'r:' .. run)
end

-- Returns a reply with the woken runs of all keys, and when each key must be checked.
local function reply_of_all(fields)
    local openings = {}
    for number = 1, all do
        turn_to(number)
        if key.opens_ms then
            openings[#openings + 1] = { key = number, ms = key.opens_ms }
            key.opens_ms = nil
        end
    end
    if openings[1] then
        fields.opens = openings
    end
    return reply(fields)
end

-- Answers a run that does not wait: it has ended, is unknown, or is in flight.
local function answer_gone()
    turn_to(1)
    home = record(run)
    local became = status_of_gone(run, home, envelope)
    if not became then
        return nil
    end
    at_each(function()
        leave_here(run, became == 'done')
        hand_on_here()
    end)
    return reply_of_all({ status = became })
end

local function give_up_at(number)
    local owner = asking[number] or '-'
    arrival = owner ~= '-' and give_up(owner) or arrival -- it returns to its place
end

-- Returns the position in the route's order of the first key that refuses the run.
local function first_closed()
    for position, number in ipairs(route.order) do
        turn_to(number)
        if refuses(run, place, route.wants[number]) then
            return position
        end
    end
end

-- Reserves all keys and sends the run, unless it is here. Returns the number of a key that a full server
-- refused.
local function reserve_all()
    turn_to(1)
    local for_ms = claim_ms()
    for number = 1, all do
        turn_to(number)
        if not reserve_here(run, place, route.wants[number], for_ms) then
            return number
        end
    end
    turn_to(1)
    home.at, home.v, home.f = nil, nil, nil
    key.is_left = key.is_left or home.s == 'waiting'
    go(run, home, 'woken', now_ms + UNSENT_MS, envelope)
    for number = 2, all do -- last: a script may be interrupted
        turn_to(number)
        leave_here(run)
    end
    turn_to(1)
    if comes ~= '1' then
        send(run, home, envelope or field('e:' .. run))
    end
end

-- Queues the run at one key, and records that at the first key.
local function wait_at(number)
    turn_to(number)
    local before = home.s == 'elsewhere' and home.at or home.s == 'waiting' and route.names[1]
    local has_moved = before ~= route.names[number]
    if has_moved and before then
        count_turn(home, counts)
    end
    if number == 1 then
        home.at = nil
        go(run, home, 'waiting', nil, envelope)
        return
    end
    local here = record(run)
    if not here or here.s ~= 'waiting' then
        go(run, entry_of(run, place, route.wants[number], 'waiting'), 'waiting')
    end
    turn_to(1)
    key.is_left = key.is_left or home.s == 'waiting'
    home.at = route.names[number]
    go(run, home, 'elsewhere', nil, envelope)
end

-- Keeps the keys before the one where the run waits, if it is aged; releases the others.
local function keep_before(position)
    local stop = route.order[position]
    turn_to(stop)
    local keeps = keeps_others(run, route.wants[stop], home)
    for at, number in ipairs(route.order) do
        turn_to(number)
        if at < position and keeps then
            keep_here(run, place, route.wants[number], KEPT_MS)
        elseif number == stop then
            local reserved = grant_for(run)
            if reserved then
                vacate(reserved)
                key.is_left = true
            end
        else
            leave_here(run, true)
        end
    end
end

read_clock()
at_each(look_at)
local gone = answer_gone()
if gone then
    return gone
end
at_each(give_up_at)
turn_to(1)
home = home or {}
place = place_record(home, arrival, envelope, channel)
local position = first_closed()
local refused = not position and reserve_all()
for each, number in ipairs(route.order) do
    position = position or (number == refused and each or nil)
end
if position then
    wait_at(route.order[position])
    keep_before(position)
end
at_each(hand_on_here)
local at = position and route.order[position] or 1
turn_to(at)
local facts = facts_here(run, place, position ~= nil)
facts.at = at
return reply_of_all(facts)
