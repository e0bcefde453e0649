-- queue.lua: grants a key's free units to its waiters, in the order of the queue.
-- KEYS lock queue tasks woken fence done rate lanes
-- USES records limits grants rates gates lanes runs answers

local GRANT_MS = 1000 -- for a blocked waiter to claim the grant that it was notified of
local SOONER_MS = 10 -- a waiter is notified again only of a time earlier by more than this
local BATCH = 8 -- grants of a key in one step
local MOST_LOOKS = 32 -- waiters checked in one step
local SOON_MS = 5 -- until the next step, if there are more
local MOST_BEFORE = 8 -- calls in flight that are checked for an earlier one of the same destination

local givers = '' -- the runs that release the key, one a line
local near_channel, near = nil, nil -- the releasing worker's delivery channel, and the destination that it serves

-- Whether the broker has an earlier call for the same destination. A pushed call would overtake it, so
-- this one goes through the broker, too. Calls that the broker has are the last in `woken`.
local function follows_another(of)
    if not of.q or redis.call('ZCARD', WOKEN) < 2 then
        return false
    end
    for _, other in ipairs(redis.call('ZRANGE', WOKEN, 0, MOST_BEFORE, 'REV')) do
        local its = record(other)
        local is_before = its and (tonumber(its.p) or 0) < (tonumber(of.p) or 0)
        if is_before and its.q == of.q and is_with_broker(its) then
            return true
        end
    end
    return false
end

-- Pushes a run to the worker that parked it, or that serves its destination. Returns whether it was
-- received.
local function push(run, of, envelope)
    local channel = of.h
    if not channel and of.q and of.q == near then
        channel = near_channel
    end
    if not channel or channel == '' or follows_another(of) then
        return false
    end
    local head = string.format('%d %d %d %s ', #LOCK, #run, #givers, of.p or '0')
    local receivers = publish(channel, head .. LOCK .. run .. givers .. envelope)
    return type(receivers) == 'number' and receivers > 0
end

-- Sends a woken run: pushes it, or has the caller of the script send it.
local function send(run, of, envelope)
    if not push(run, of, envelope) then
        note_woken(run, envelope)
    end
end

-- Has the caller of the script try all keys of a run.
local function note_route(run, of)
    note_woken(run, '', { route = of.k, givers = givers })
end

local function run_of(member)
    return string.match(member, '^p:(.*)$')
end

-- Removes a waiter and its want. Returns whether it was in the queue.
local function remove_waiter(member)
    local run = run_of(member)
    local of = run and record(run)
    local place, want_text = of and of.p, of and of.w
    if not run then
        place, want_text = last_turn() and redis.call('ZSCORE', QUEUE, member), field('w:' .. member)
    end
    if want_text and not run then
        redis.call('HDEL', TASKS, 'w:' .. member)
        key.tasks['w:' .. member] = false
    end
    return dequeue(member, place, want_text)
end

local function want_of(member)
    local run = run_of(member)
    local of = run and record(run)
    return want_in(run and (of and of.w) or field('w:' .. member))
end

-- Reserves what a waiter wants, which arrived at `place`. Returns false if the server is full.
local function reserve(owner, run, place, for_ms, want)
    local terms = terms_for(want)
    local token = grant_to(owner, run, for_ms, want, RESERVED, place, terms and STARTS or '')
    if token and terms then
        reserve_start(owner, terms, place)
    end
    return token ~= nil
end

-- Grants what the caller wants, which arrived at `came`. Returns the token and the slot, or nothing
-- and the server's refusal.
local function take(owner, run, lease_ms, want, came)
    local token, slot = grant_to(owner, run, lease_ms, want, HELD, 0, '')
    local terms = token and terms_for(want)
    if terms then
        start(owner, terms, came)
    end
    return token, slot
end

-- Transfers a reservation to the owner that claims it, and counts the start: the reserved one, or a new
-- one, as an operator may have set a rate since.
local function claim(grant, owner, run, lease_ms, want)
    local had_start, before = string.find(grant.flags, STARTS, 1, true), grant.owner
    pass(grant, owner, run, lease_ms, HELD)
    local terms = not (had_start and begin_start(before, owner)) and terms_for(want)
    if terms then
        start(owner, terms, now)
    end
end

-- Counts the start of a repeated request now. Nothing has begun yet: the answer to the first request was
-- lost, or its script was interrupted.
local function start_again(owner, want)
    if key.start or want.terms then
        refund(owner)
        local terms = terms_for(want)
        if terms then
            start(owner, terms, now)
        end
    end
end

-- Revokes a reservation, and returns its run to its place in the queue.
local function step_back(grant)
    vacate(grant)
    local run = string.match(grant.owner, '^parked:(.*)$')
    local of = run and record(run)
    if of and not of.k and grant.stage == RESERVED then
        queue_again(run, of, grant.place)
    elseif of and of.s == 'kept' then
        forget_run(run)
    end
end

local function may_step_back(grant, place, stages)
    if grant.place <= place or not string.find(stages, grant.stage, 1, true) then
        return false
    end
    local of = record(grant.run)
    return not (of and want_in(of.w).is_strict)
end

-- Returns the shared reservations that a request with this place may revoke, latest arrival first.
local function late_grants(place, stages)
    local grants, found = {}, {}
    if key.count <= FEW then
        grants = live_grants()
    else
        for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, FEW - 1)) do
            grants[#grants + 1] = grant_for(run)
        end
        grants[#grants + 1] = key.kept and grant_for(key.kept) or nil
    end
    for _, grant in ipairs(grants) do
        found[#found + 1] = may_step_back(grant, place, stages) and grant or nil
    end
    table.sort(found, function(one, other)
        return one.place > other.place
    end)
    return found
end

-- Revokes unclaimed reservations of later arrivals, latest first, until the want is admitted. Returns
-- whether it is.
local function make_room(place, want, stages)
    if place <= 0 or (key.tasks.turn ~= false and last_turn()) then
        return false -- turns do not follow the order of arrival
    elseif key.alone then
        if not may_step_back(key.alone, place, stages) then
            return false
        end
        step_back(key.alone)
        return true
    elseif place >= key.late or not opens(want) then
        return false
    end
    for _, grant in ipairs(late_grants(place, stages)) do
        step_back(grant)
        if not opens(want) then
            return true
        end
    end
    return false
end

-- Notifies the first blocked waiter of a key with a rate when it should try again, so that no ticker is
-- needed. A waiter that is the caller gets the time in the answer.
local function call_first(member, ms, is_here)
    local inbox, owner = string.match(member, '^b:(%S+) (.+)$')
    if not inbox or redis.call('EXISTS', RATE) == 0 then
        return
    end
    local looks_ms, known = string.match(redis.call('HGET', RATE, 'looks') or '', '^(%d+) (.*)$')
    local at_ms = now_ms + ms
    if not is_here and known == member and tonumber(looks_ms) <= at_ms + SOONER_MS then
        return
    end
    redis.pcall('HSET', RATE, 'looks', integer(at_ms) .. ' ' .. member)
    if not is_here then
        publish(inbox, owner)
    end
end

-- Returns the next waiter, and its place in the queue.
local function first_waiter(only_looks)
    if key.tasks.turn ~= false and (key.tasks.turn or last_turn()) then
        return first_in_turn(only_looks)
    end
    local head = key.head or redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')
    key.head = #head == 0 and head or nil -- what is read of others may be out of date next time
    return unpack(head)
end

-- Whether a waiter is the next one.
local function has_the_turn(member)
    if last_turn() then
        return first_in_turn() == member
    end
    return redis.call('ZRANK', QUEUE, member) == 0
end

-- Reads at once what a release needs to know of tasks: of its run, and of the first waiter, which is that of
-- a lane if the grant that is released was for one.
local function fetch_with_first(run, mine)
    local is_in_lane = mine and mine.flags ~= '' and string.find(mine.flags, IN_LANE)
    local turn, head = is_in_lane and read_turn(0), nil
    if turn then
        head = { string.sub(turn.entries[1] or '', #turn.lane + 19) }
    else
        head = redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')
    end
    local names = { 'limit', 'turn', run ~= '' and 'r:' .. run or nil }
    local next_run = head[1] and run_of(head[1])
    if next_run then
        names[#names + 1] = 'r:' .. next_run
        names[#names + 1] = 'e:' .. next_run
    end
    fetch(unpack(names))
    if not turn then
        key.head = head
    elseif key.tasks.turn then
        key.turn = turn
    end
end

-- Notes in a run's record whether time is all that it waits for.
local function note_cause(member, is_time)
    local run = run_of(member)
    local of = run and record(run)
    if of and (of.u or false) ~= is_time then
        of.u = is_time or nil
        redis.pcall('HSET', TASKS, 'r:' .. run, cjson.encode(of)) -- a full server may refuse it
    end
end

-- Notes when the head of the queue will be admitted through time alone, if it is not admitted now.
local function look_ahead(member, is_here)
    member = member or first_waiter()
    local want = member and want_of(member)
    local at = want and opens(want) or nil
    local ms = in_ms(at)
    if at then
        note_cause(member, waits_for_time(at, want))
    end
    if ms then
        note_look(ms)
        call_first(member, ms, is_here)
    end
    return ms
end

-- Reserves the key for a blocked waiter. Returns served, gone, closed: it has to wait; or capped: only its
-- lane has to.
local function offer_to_blocked(member, place)
    local want = want_of(member)
    if opens(want) then
        if want.lane and is_capped(want) then
            return 'capped'
        end
        look_ahead(member)
        return 'closed'
    end
    local inbox, owner = string.match(member, '^b:(%S+) (.+)$')
    local receivers = inbox and publish(inbox, owner) or 0
    if receivers == 0 then
        remove_waiter(member)
        return 'gone'
    elseif not reserve(owner, '', tonumber(place), GRANT_MS, want) then
        return 'closed'
    end
    remove_waiter(member)
    if key.tasks.turn then
        pass_turn(want, true)
    end
    return 'served'
end

-- Reserves the key for a parked run, and sends it. Returns false if the server is full.
local function wake(run, of, place, want)
    if not reserve(reserved_owner(run), run, place, claim_ms(), want) then
        return false
    elseif of.s == 'woken' then
        dequeue('p:' .. run, place, of.w) -- it was queued again while in flight
    else
        go(run, of, 'woken', now_ms + UNSENT_MS)
        send(run, of, field('e:' .. run))
    end
    if want.is_strict then
        lengthen(grant_for(run), STRICT_MS) -- last: an interrupted script must not leave it without a message
    end
    if key.tasks.turn then
        pass_turn(want, true)
    end
    return true
end

-- Serves a parked run. Returns served, gone, closed or capped; or elsewhere: it needs several keys, and the
-- caller of the script tries all of them.
local function offer_to_run(member, place)
    local run = run_of(member)
    if key.tasks['e:' .. run] == nil then
        fetch('r:' .. run, 'e:' .. run)
    end
    local of = record(run)
    local needs_more = of and of.k
    local is_next = of and (of.s == 'waiting' or (of.s == 'woken' and not needs_more))
    if not is_next or not (needs_more or field('e:' .. run)) then -- else a script was interrupted
        dequeue(member, place, of and of.w)
        return 'gone'
    end
    local held, want = held_by(run), want_in(of.w)
    if held and not of.b then
        go(run, of, 'running', held.ends) -- a second delivery: others go first
        return 'gone'
    elseif opens(want) then
        if want.lane and is_capped(want) then
            return 'capped'
        end
        look_ahead(member)
        return 'closed'
    elseif needs_more then
        note_route(run, of)
        return 'elsewhere'
    end
    return wake(run, of, tonumber(place), want) and 'served' or 'closed'
end

-- Notes when time may admit more of a lane that is at its most.
local function note_lanes(at)
    local ms = key.tasks.turn and in_ms(at)
    if ms then
        note_look(ms)
    end
end

-- Returns when (ms) the first limit of a lane ends.
local function first_lane_end()
    local first = NEVER
    for _, limit in pairs(lane_limits()) do
        first = math.min(first, limit.ends or NEVER)
    end
    return first
end

-- Passes the lane of the head, which has as many units as it may. Returns gone, or closed if there are no lanes.
local function pass_lane(head)
    local most, ends = most_for(want_of(head))
    note_cause(head, most == 0)
    note_lanes(ends)
    return cap_turn() and 'gone' or 'closed'
end

-- Serves waiters from the head of the queue, as many as are admitted. Stops at `me`: a waiter or run, or
-- the `place` of a request (0: it has none); with lanes, a run that was woken. Returns empty: no
-- waiter is left; here: `me` is next; closed: the head has to wait, or nothing is free.
local function hand_on(me)
    if key.alone or (key.up and settle_upgrade()) then
        return 'closed'
    end
    local served = 0
    for _ = 1, MOST_LOOKS do
        local head, place = first_waiter()
        local is_mine = head and me and (head == me.member or head == me.parked)
        if not head then
            if key.tasks.turn then
                end_lanes()
                note_lanes(first_rest_end())
            end
            return 'empty'
        elseif is_mine and not (key.turn and is_capped(want_of(head))) then
            return 'here'
        elseif me and not key.tasks.turn and me.place > 0 and me.place < tonumber(place) then
            return 'here'
        elseif me and key.tasks.turn and me.has_had_turn then
            return 'here'
        end
        local became = is_mine and 'capped' or run_of(head) and offer_to_run(head, place)
        became = became or offer_to_blocked(head, place)
        served = served + (became == 'served' and 1 or 0)
        if became == 'capped' then
            became = pass_lane(head)
        end
        if became == 'closed' or became == 'elsewhere' or key.alone then
            return 'closed'
        elseif served == BATCH then
            break
        end
    end
    note_look(SOON_MS)
    return 'closed'
end

-- Removes a grant, if there is one, and serves the next waiters.
local function free(grant)
    if grant then
        vacate(grant, true)
    end
    hand_on()
    tidy()
end

-- Whether a run is in flight: woken, and its key not claimed yet.
local function is_in_flight(run, of)
    if not of or held_by(run) then
        return false
    end
    local _, settles = ends_of(run)
    local ends = settles and settles > now_ms -- else its process counts as dead
    return not ends and redis.call('ZSCORE', WOKEN, run)
end
