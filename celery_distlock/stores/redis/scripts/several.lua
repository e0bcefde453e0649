-- several.lua: runs that need several keys. A waiting run holds none of them, and is in one queue: that
-- of the first key that refuses it. When that key opens, all of its keys are tried in one step.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- After several failed attempts a run is aged: while it is the head of the queue where it waits, the keys
-- before that one are kept for it. An earlier run takes keys that are kept for a later one.
-- USES records grants limits rates gates runs answers queue

local TURNS = 8 -- failed attempts, after which a run is aged
local FEWER_TURNS, AGED_MS = 2, 3000 -- or fewer, if the first was this long ago
local KEPT_MS = 20000 -- for which a key is kept; extended before it ends
local FAR_MS = 5000 -- no other key is kept if a rate opens later than this
local AWAY = 5000000 -- µs for which a key is kept before a blocked waiter gets it
local MOST_WAITERS = 10000 -- that are searched for a blocked one

local route = { names = {}, wants = {} }

-- Parses a route, and orders its keys as they are tried: exclusive ones, shared ones, those with a rate.
local function read_route(text)
    local names, task, wants, from = string.match(text .. '\n\n\n', '^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)')
    local classes, order, next_want = {}, {}, string.gmatch(wants, '%S+')
    for name in string.gmatch(names, '%S+') do
        local want = want_in(next_want())
        local number = #order + 1
        route.names[number], route.wants[number], order[number] = name, want, number
        classes[number] = want.terms and 3 or want.capacity == 1 and 1 or 2
    end
    table.sort(order, function(one, other)
        return classes[one] < classes[other] or (classes[one] == classes[other] and one < other)
    end)
    route.text, route.task, route.order = text, task ~= '' and task or nil, order
    route.from = from ~= '' and from or nil
end

-- Returns nothing if the key admits the run that arrived at `place`, else when (ms) it will. Waiters that
-- arrived earlier go first.
local function refuses(run, place, want)
    local head, head_place = first_waiter()
    local member = 'p:' .. run
    head_place = tonumber(head_place)
    if held_by(run) or (head and head ~= member and (head_place < place or (head_place == place and head < member))) then
        return NEVER
    end
    local mine = grant_for(run)
    local at = opens(want, mine)
    if at and make_room(place, want, KEPT) then
        key.is_left = true
        at = opens(want, mine)
    end
    return at
end

-- Returns the status of a run that does not wait: done: it has ended or is unknown; busy: it is in flight.
local function status_of_gone(run, of, envelope)
    local waits = of and (of.s == 'waiting' or of.s == 'elsewhere')
    if not (of and not envelope) and ends_of(run) then
        return 'done'
    elseif not envelope and not waits then
        return (of or held_by(run) or grant_for(run)) and 'busy' or 'done'
    end
end

-- Completes a run's record at its first key. Returns its place.
local function place_record(of, arrival, envelope, channel)
    local place, want = tonumber(of.p or 0), route.wants[1]
    place = place > 0 and place or place_of(tonumber(arrival))
    of.p, of.k, of.t, of.o = integer(place), route.text, route.task, route.from
    if envelope then
        of.h, of.n, of.d, of.c = channel, nil, nil, nil
        of.w = want.text ~= '' and want.text or nil
    end
    return place
end

-- Releases the grant of an owner whose run has to wait. Returns the run's arrival if the grant was a
-- reservation.
local function give_up(owner)
    local grant = owner ~= '' and grant_of(owner)
    if not grant then
        return nil
    end
    refund(owner)
    vacate(grant)
    key.is_left = true
    return grant.place > 0 and grant.place or nil
end

-- Returns the record of a run at a key other than its first, where its envelope is not.
local function entry_of(run, place, want, state)
    local of = { s = state, b = 1, p = integer(place), w = want.text ~= '' and want.text or nil }
    of.k, of.t, of.o = route.text, route.task, route.from
    return of
end

-- Releases the kept (with `is_reserved`, also a reserved) grant of a run, and removes it from the queue.
local function leave_here(run, is_reserved)
    local of, grant = record(run), grant_for(run)
    if grant and (is_reserved or grant.stage == KEPT) then
        vacate(grant)
        key.is_left = true
    end
    if of and of.b then
        key.is_left = forget_run(run) or key.is_left
    end
end

-- Whether a kept grant must be released because a waiter is blocked here: that one may hold the key for
-- which the run waits.
local function gives_way(kept)
    if kept.stage ~= KEPT or now - kept.since < AWAY then
        return false
    end
    return redis.call('ZSCAN', QUEUE, '0', 'MATCH', 'b:*', 'COUNT', MOST_WAITERS)[2][1] ~= nil
end

-- Keeps a free key for a run that waits elsewhere. With `stays`, a run that is queued here stays queued.
local function keep_here(run, place, want, for_ms, stays)
    local mine, other = grant_for(run), key.kept and grant_for(key.kept)
    if mine and not stays and gives_way(mine) then
        leave_here(run)
        return
    elseif mine then
        lengthen(mine, for_ms)
    elseif other and other.stage == KEPT and not stays then
        return -- kept for an earlier run
    elseif grant_to(reserved_owner(run), run, for_ms, want, KEPT, place, '') and want.capacity ~= 1 then
        redis.call('HSET', LOCK, 'kept', run)
    end
    local of = record(run)
    if not of then
        write_run(run, entry_of(run, place, want, 'kept'))
    elseif of.b and of.s ~= 'kept' and not stays then
        go(run, of, 'kept')
    end
    if not stays then
        note_look(for_ms / 2) -- it is extended then
    end
end

-- Reserves one of a run's keys. Returns false if the server is full.
local function reserve_here(run, place, want, for_ms)
    local mine = grant_for(run)
    if last_turn() then
        pass_turn(want)
    end
    if not mine then
        return reserve(reserved_owner(run), run, place, for_ms, want)
    end
    mine.ends, mine.stage, mine.place = math.ceil(now_ms + for_ms), RESERVED, place
    local terms = not string.find(mine.flags, STARTS, 1, true) and terms_for(want)
    if terms then
        reserve_start(mine.owner, terms, place)
        mine.flags = mine.flags .. STARTS
    end
    write_grant(mine)
    return true
end

-- Serves the waiters of a key where something was released.
local function hand_on_here()
    if key.is_left then
        hand_on()
        key.is_left = false
    end
    tidy()
end

-- Returns what a reply contains of a run that waits here, or for which the key is reserved. Also returns
-- whether it waits.
local function facts_here(run, place, is_closed)
    local ahead = redis.call('ZRANK', QUEUE, 'p:' .. run)
    if is_closed and has_the_turn('p:' .. run) and not key.opens_ms then
        look_ahead()
    end
    local facts = with_holder(is_closed and 'parked' or 'reserved', a_holder())
    facts.place, facts.since = ahead or 0, integer(place)
    return facts, ahead ~= false
end

-- Counts a failed attempt.
local function count_turn(of, counts)
    if counts == '1' then
        of.v, of.f = tonumber(of.v or 0) + 1, of.f or integer(now_ms)
    end
end

local function is_aged(of)
    local turns = tonumber(of.v or 0)
    return turns >= TURNS or (turns >= FEWER_TURNS and now_ms - tonumber(of.f or now_ms) >= AGED_MS)
end

-- Whether the keys before this one are kept for a run while it waits here.
local function keeps_others(run, want, of)
    local is_first = has_the_turn('p:' .. run)
    local is_closed = paused() or resting() or too_soon(want)
    local is_far = is_closed and (paused() or resting() or is_closed > now_ms + FAR_MS)
    return is_aged(of) and is_first and not is_far
end
