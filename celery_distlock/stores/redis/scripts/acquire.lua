-- acquire.lua: grant the key, queue the request, or report the current holder. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner lease_ms run arrival [want request envelope]
-- returns token: granted exclusively | {'granted', token, slot, waited_for}: granted | a `reply`
--         (answers.lua) with status: granted, with these fields, and waiters are admitted too |
--         done | recalled: it was asked to leave, and does not begin again | full: nothing was done,
--         `most` wait; busy or parked, with the fields below
--
-- waited_for  what a run waited for last: time, or holder. Missing: nothing, or its caller knows
-- holder    owner of one grant; with its run, its token, and ttl_ms until its lease ends
-- place     number of waiters ahead; -1: not queued, waits for the first delivery of its run to end
-- since     arrival (µs), or 0
-- for_time  it is the first, and waits for time alone, or for the end of a pause
-- is_open   with mode line: the key would be granted now, so no release will wake this run
-- request   JSON; fields that are missing are false:
-- mode      try (the default): do not queue. wait: queue as a blocked waiter with an inbox.
--           park: queue the run and its envelope. `channel` is the delivery channel of the worker that
--           parks it; `task`, a name, and `destination`, from where its message came, are for display.
--           line: like park, but never take the key or hand it over, even if it is free. The caller
--           then claims the key itself, or has the key checked soon.
-- most      of those that wait, for a run that is not known yet to be queued; 0: any number
-- repeated  whether the run's message may have been delivered before
-- arrival   the caller's arrival (µs) by this server's clock, as an earlier answer or another process
--           reported it; 0: now
-- keep      whether the store has the only copy of the message: keep it until the run has ended
-- want      units/capacity, or units/capacity/terms with its rates; empty: exclusive
-- USES records grants limits rates gates runs answers queue
-- OFTEN look_at_all look load fetch field known_number reserved_owner read_grant want_in grant_of
-- OFTEN grant_for record answer_copy answer_ended ends_of my_place answer_wait join
-- OFTEN place_of new_place ahead_in new_record go enqueue is_in_woken write_run a_holder reply named with_holder
-- OFTEN answer_second held_by answer_claim cause_of waits_for_time is_wanted is_enough claim_opens too_soon
-- OFTEN terms_for paused resting limit_now
-- OFTEN read_limits pass write_grant row_of integer outlive claim arrive forget_run granted

local owner, lease_ms, run, arrival, want, request, envelope = unpack(ARGV)
request = request and cjson.decode(request) or {}
want, envelope = want ~= '' and want or nil, envelope or ''
local mode, repeated, keep = request.mode or 'try', request.repeated, request.keep
local blocks, parks = mode == 'wait', mode == 'park' or mode == 'line'
local leaves = false -- whether it gave up a reservation in this call
local recalled = nil -- when the run was asked to leave (ms)
local member = blocks and 'b:' .. request.inbox .. ' ' .. owner or run ~= '' and 'p:' .. run or ''
lease_ms, arrival = tonumber(lease_ms), tonumber(arrival)

-- Claims a reservation of a blocked waiter that is exclusive, if nothing forbids it. Returns the token.
local function claim_alone()
    local token, row, rest = unpack(redis.call('HMGET', LOCK, 'token', 'x', 'rest'))
    local ends, place, since, names = string.match(row or '', '^(%d+) 0 %-1 r (%d+) (%d+) (.*)$')
    if rest or names ~= #owner .. ' ' .. owner or (existing > 1 and redis.call('HEXISTS', TASKS, 'limit') == 1) then
        return nil
    end
    read_clock()
    if tonumber(ends) <= now_ms then
        return nil
    end
    ends = math.max(ends, math.ceil(now_ms + lease_ms))
    redis.call('PEXPIRE', LOCK, math.ceil(ends - now_ms)) -- first, as in write_grant()
    redis.call('HSET', LOCK, 'x', string.format('%d', ends) .. ' 0 -1 h ' .. place .. ' ' .. since .. ' ' .. names)
    return token
end

local function look_at_all()
    look(owner, run)
    if run ~= '' then
        fetch('limit', 'turn', 'r:' .. run)
    end
    want = want_in(want)
end

local function new_record()
    local before = record(run) or {}
    local of = { s = before.s, p = before.p, w = want.text ~= '' and want.text or nil, h = request.channel or '' }
    of.t, of.q, of.i = request.task or before.t, before.q, before.i
    of.o = request.destination or before.o
    of.r = recalled and 2 or before.r
    return of
end

-- Answers a second delivery if the first one has ended, or if its result is being stored.
local function answer_ended()
    local ended, settles, _, asked = ends_of(run)
    local left_ms = settles and settles - now_ms or 0
    recalled = asked
    if ended then
        return reply({ status = 'done' })
    elseif left_ms > 0 then
        if parks then
            go(run, new_record(), 'settling', settles, envelope)
        end
        return reply({ status = parks and 'parked' or 'busy', run = run, ttl_ms = math.ceil(left_ms), place = -1 })
    end
end

-- Answers a second delivery of a run that was asked to leave.
local function answer_recalled()
    if blocks then
        remove_waiter(member)
    end
    return reply({ status = mode == 'line' and 'done' or 'recalled' }) -- the caller asks again where it executes
end

-- Answers a run that holds the key with another owner, or that has ended.
local function answer_copy()
    local may_be_copy = run ~= '' and (repeated or parks) -- an earlier request may have parked it
    local result = may_be_copy and answer_ended()
    if result then
        if blocks then
            remove_waiter(member)
        end
        return result
    end
    if recalled and not held_by(run) then
        return answer_recalled()
    end
    local other = not key.alone and held_by(run)
    return other and answer_while_held(other)
end

-- Queues a run again whose claim was refused, so that no later request is admitted before its caller
-- has parked it.
local function wait_again(place)
    local of = leaves and record(run)
    if of and not of.k and place > 0 then
        queue_again(run, of, place)
    end
end

-- Queues the request, as its mode requires. Returns its arrival.
local function join(place)
    if mode == 'try' then
        wait_again(place)
        return place
    end
    place = place > 0 and place or new_place(want.text)
    if parks then
        local of = new_record()
        of.p = integer(place)
        go(run, of, 'waiting', nil, envelope)
        return place
    end
    local known = arrival > 0 and redis.call('ZSCORE', QUEUE, member)
    local is_new = not known and enqueue(member, integer(place), want.text)
    if want.text ~= '' then
        redis.call('HSET', TASKS, 'w:' .. member, want.text)
        key.tasks['w:' .. member] = want.text
    end
    return is_new and place or tonumber(known or redis.call('ZSCORE', QUEUE, member))
end

local function answer_wait(place)
    if parks and request.most and is_full(run, request.most) then
        return reply(with_holder('full', a_holder()))
    end
    place = join(place)
    local facts = with_holder(parks and 'parked' or 'busy', a_holder())
    local ahead = member ~= '' and redis.call('ZRANK', QUEUE, member) or redis.call('ZCARD', QUEUE)
    local may_open, is_first = not key.alone or key.alone.stage == RESTING, ahead == 0
    if key.tasks.turn then
        is_first = may_open and has_the_turn(member)
    end
    local is_next = is_first and may_open
    facts.place, facts.since = ahead, integer(place)
    local at = is_next and opens(want) or nil
    facts.is_open = is_next and mode == 'line' and not at or nil
    facts.for_time = waits_for_time(at, want) or nil
    if mode == 'try' then
        look_early(is_first)
    elseif is_next and not facts.is_open then
        key.opens_ms = nil -- noted for the previous head of the queue
        local ms = look_ahead(member, true)
        facts.ttl_ms = blocks and ms or facts.ttl_ms -- a blocked waiter tries again then
    end
    return reply(facts)
end

local function my_place()
    local of = run ~= '' and record(run)
    return of and tonumber(of.p) or (arrival > 0 and place_of(arrival)) or 0
end

-- Answers a second delivery while the first one holds the key: it may run, but only afterwards.
local function answer_while_held(held)
    local left_ms = held.ends - now_ms
    if parks then
        go(run, new_record(), 'running', held.ends, envelope)
    elseif blocks then
        remove_waiter(member)
    end
    local facts = with_holder(parks and 'parked' or 'busy', held.owner, run, math.ceil(left_ms))
    facts.place = -1
    return reply(facts)
end

-- Releases the run's reservation, and a grant that the owner got before it named its run.
local function leave_all(mine, reserved)
    if reserved then
        vacate(reserved)
    end
    if mine and mine.run ~= run then
        vacate(mine)
    end
    hand_on()
end

-- Answers a run that has a reservation although its other delivery is running or has ended.
local function answer_second(mine, reserved)
    if not reserved and not (mine and run ~= '' and mine.run ~= run) then
        return nil
    end
    local other, of = held_by(run), record(run)
    local ended, settles = nil, nil
    if repeated and not (reserved and of) then -- an ended run has no record
        local _
        ended, settles, _, recalled = ends_of(run)
    end
    recalled = recalled or (of and of.r == 2)
    if not (ended or (settles and settles > now_ms) or (other and other ~= mine) or (recalled and not other)) then
        return nil
    end
    leave_all(mine, reserved)
    if other then
        return answer_while_held(other)
    end
    return answer_ended() or answer_recalled()
end

-- Releases a reservation that may not be claimed now. The request returns to its place in the queue.
local function give_back(reserved, place)
    vacate(reserved)
    arrival, leaves = place, true
end

-- Answers an owner that already has a grant: a repeated request, or a blocked waiter's claim.
local function answer_mine(mine, reserved)
    if reserved and reserved ~= mine then
        forget_shared(reserved) -- it was served twice, or a transfer was interrupted
        sum_up()
    end
    local before = mine.run
    local its_run = run == '' and before or run
    if mine.stage ~= RESERVED then
        pass(mine, owner, its_run, lease_ms, HELD)
        start_again(owner, want)
    elseif claim_opens(mine, want) then
        return give_back(mine, mine.place)
    else
        claim(mine, owner, its_run, lease_ms, want)
    end
    if run ~= '' and before ~= run then
        arrive(run, mine, keep, lease_ms) -- the grant was made before the run was known
    end
    return granted(key.token, mine.slot)
end

-- Returns what the run of a reservation waited for. Nothing: it did not wait, or its message was parked by
-- its caller, which knows that it waited for a holder.
local function cause_of(reserved, of)
    if of and of.u then
        return 'time'
    end
    return of and of.q and reserved.place > 0 and reserved.place < tonumber(reserved.since) and 'holder' or nil
end

-- Answers the claim of a run's reservation, which must match what the run wants now.
local function answer_claim(reserved)
    if mode == 'line' then
        return reply({ status = 'done' }) -- an earlier copy of this request parked it: its message is in flight
    end
    local of = record(run)
    local is_right = is_wanted(reserved, want, of and (of.w or '') or want.text)
    local closed = is_right and claim_opens(reserved, want)
    if not is_right or closed then
        return give_back(reserved, reserved.place > 0 and reserved.place or closed and FIRST or arrival)
    end
    local waited_for = cause_of(reserved, of)
    claim(reserved, owner, run, lease_ms, want)
    arrive(run, reserved, keep, lease_ms)
    if mode == 'park' then
        flag(reserved, AGAIN) -- an earlier copy of this request parked it, and it was woken since
    end
    return granted(key.token, reserved.slot, waited_for)
end

local function granted(token, slot, waited_for)
    local is_alone = want.capacity == 1 and slot < 0
    if is_alone and not waited_for then
        return token
    elseif not is_alone then
        hand_on() -- a shared grant may leave room for others
    end
    return answer_granted(token, slot, waited_for)
end

-- Serves the waiters ahead of the request. Returns whether it is admitted now.
local function has_its_turn(place, of)
    local overtakes = make_room(place, want, RESERVED .. KEPT)
    if key.alone then
        return false
    end
    local is_free = key.count == 0 and key.rest <= now_ms
    local has_had_turn = of and is_in_woken(of.s) and not (want.lane and is_capped(want))
    local turn = 'empty'
    if not (overtakes or (has_had_turn and want.capacity == 1 and is_free)) then
        turn = hand_on({ member = member, parked = 'p:' .. run, place = place, has_had_turn = has_had_turn })
    end
    return not (turn == 'closed' or opens(want))
end

-- Answers a request once the waiters ahead of it have been served.
local function answer_turn(place)
    local of = run ~= '' and record(run)
    local is_next = has_its_turn(place, of)
    local served = not key.alone and grant_of(owner) -- it was queued too, and has just been served
    if served then
        claim(served, owner, run, lease_ms, want)
        return granted(key.token, served.slot)
    elseif not is_next then
        return nil
    end
    local token, slot = take(owner, run, lease_ms, want, place > 0 and place or now)
    if not token then
        return slot
    end
    local waited = false -- a woken run has had its turn
    if of then
        waited = remove_waiter('p:' .. run) and not is_in_woken(of.s)
        arrive(run, grant_of(owner), keep, lease_ms)
    end
    if blocks then
        waited = remove_waiter(member) or waited
    end
    if waited and key.tasks.turn then
        pass_turn(want, true)
    end
    return granted(token, slot)
end

-- Notes when the key should be checked for a caller that does not queue.
local function look_early(is_first)
    if leaves and not is_first then
        note_look(LOOK_MS) -- the waiters ahead were not notified of what it gave up
    end
    local ms = is_first and opens_by_rate(want)
    if ms then
        note_look(ms)
    end
end

local is_plain = not (parks or repeated or want)
local existing = is_plain and redis.call('EXISTS', LOCK, QUEUE, TASKS)
-- The most frequent case: the key has neither a holder nor a waiter.
if existing == 0 then
    read_clock()
    local token, refused = write_alone(owner, run, lease_ms, HELD, '0')
    return token or refused
end
local claimed = existing and blocks and run == '' and claim_alone()
if claimed then
    return claimed
end
look_at_all()
local mine, reserved, result = grant_of(owner), grant_for(run), nil
if reserved and blocks then
    remove_waiter(member) -- it was blocked, and now claims its run's reservation
end
if mine or reserved then
    result = answer_second(mine, reserved)
end
if mine and not result then
    result = answer_mine(mine, reserved)
elseif reserved and not result then
    result = answer_claim(reserved)
end
result = result or answer_copy()
if result then
    return result
end
local place = my_place()
if mode ~= 'line' then
    result = answer_turn(place)
end
return result or answer_wait(place)
