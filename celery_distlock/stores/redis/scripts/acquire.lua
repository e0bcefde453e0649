-- acquire.lua: take the key, or join its queue, or learn who holds it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms run arrival [want request envelope]
-- returns token: granted | {'granted', token, slot}: likewise, beside others | as queue.lua's `reply`,
--         with status: granted, token and slot: likewise, and others are let in | done | busy or
--         parked, with the facts below
--
-- holder    one who has the key, its run, the token, and ttl_ms, until its lease ends
-- place     how many stand before it; -1: it does not stand in the queue, and waits for its first
--           delivery to end
-- since     when it came, or 0
-- is_open   whether it would be granted the key, and lines up: no release wakes it
-- request   JSON; what is not in it is false:
-- mode      try, if not given: do not queue. wait: queue as a blocked waiter with an inbox.
--           park: queue the run and its envelope; channel is where a worker would take it,
--           task the name that is shown to those who look.
--           line: as park, but neither take the key nor hand it over, not even if it is free:
--           somebody comes for it, or else who lines up has it looked after.
-- repeated  whether the run's message may have been delivered before
-- arrival   when the caller came (µs): by this server's clock as others know it, or as an earlier
--           answer told; 0: it comes now
-- keep      whether only the store has the run's message: it stays here until the run has ended
-- want      units/capacity, or units/capacity/terms with its rates; empty: all of it, beside nobody
-- USES records grants limits rates gates runs answers queue
-- OFTEN look_at_all look load fetch field known_number reserved_owner read_grant want_in grant_of
-- OFTEN grant_for record read_record answer_copy answer_ended ends_of my_place answer_wait join
-- OFTEN place_of last_arrival new_record go write_run a_holder reply named answer_second held_by
-- OFTEN answer_mine answer_claim is_wanted is_enough claim_opens too_soon paused resting limit_now
-- OFTEN read_limit pass write_grant field_of begin arrive forget_run granted

local owner, lease_ms, run, arrival, want, request, envelope = unpack(ARGV)
request = request and cjson.decode(request) or {}
want, envelope = want ~= '' and want or nil, envelope or ''
local mode, repeated, keep = request.mode or 'try', request.repeated, request.keep
local blocks, parks = mode == 'wait', mode == 'park' or mode == 'line'
local leaves = false -- for now, what was reserved for it
local may_be_copy = repeated or parks -- an earlier request may have parked it
local member = blocks and 'b:' .. request.inbox .. ' ' .. owner or run ~= '' and 'p:' .. run or ''
lease_ms, arrival = tonumber(lease_ms), tonumber(arrival)

-- Answers most requests: nobody holds the key, nobody waits.
local function take_free_key()
    if not (parks or repeated or want) and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0 then
        read_clock()
        key.rest, key.count = 0, 0
        local token, refused = grant_alone(owner, run, lease_ms, HELD, 0, '')
        return token or refused
    end
end

local function look_at_all()
    look(owner, run)
    if run ~= '' then
        fetch('limit', 'r:' .. run)
    end
    want = want_in(want)
end

local function new_record()
    local before = record(run) or {}
    local of = { s = before.s, p = before.p, w = want.text ~= '' and want.text or nil, h = request.channel or '' }
    of.t, of.q, of.i = request.task or before.t, before.q, before.i
    return of
end

-- Answers a second delivery whose first one has ended, or whose result is being stored.
local function answer_ended()
    local ended, settles = ends_of(run)
    local left_ms = settles and settles - now_ms or 0
    if ended then
        return reply({ status = 'done' })
    elseif left_ms > 0 then
        if parks then
            go(run, new_record(), 'settling', settles, envelope)
        end
        return reply({ status = parks and 'parked' or 'busy', run = run, ttl_ms = math.ceil(left_ms), place = -1 })
    end
end

-- Answers a run that has the key by another owner, or has ended.
local function answer_copy()
    local told = run ~= '' and may_be_copy and answer_ended()
    if told then
        if blocks then
            strike(member)
        end
        return told
    end
    local other = not key.alone and held_by(run)
    return other and answer_put_off(other.owner, other.ends - now_ms)
end

-- Puts a run that came for its grant, and may not have it, back into the queue: no other may enter
-- before its caller has parked it again.
local function wait_again(stands)
    local of = leaves and record(run)
    if of and not of.k and stands > 0 then
        redis.call('ZADD', QUEUE, 'NX', integer(stands), 'p:' .. run)
        of.y = true
        write_run(run, of)
    end
end

-- Puts one that has to wait into the queue; returns its arrival.
local function join(stands)
    if mode == 'try' then
        wait_again(stands)
        return stands
    end
    stands = stands > 0 and stands or place_of(0)
    if parks then
        local of = new_record()
        of.p = integer(stands)
        go(run, of, 'waiting', nil, envelope)
        return stands
    end
    redis.call('ZADD', QUEUE, 'NX', integer(stands), member)
    if want.text ~= '' then
        redis.call('HSET', TASKS, 'w:' .. member, want.text)
        key.tasks['w:' .. member] = want.text
    end
    return tonumber(redis.call('ZSCORE', QUEUE, member))
end

local function answer_wait(stands)
    stands = join(stands)
    local holder, its_run, ttl_ms = a_holder()
    local place = member ~= '' and redis.call('ZRANK', QUEUE, member) or redis.call('ZCARD', QUEUE)
    local may_open = place == 0 and (not key.alone or key.alone.stage == RESTING)
    local is_open = may_open and mode == 'line' and not opens(want)
    if mode == 'try' then
        look_early(place)
    elseif may_open and not is_open then
        key.opens_ms = nil -- the first before it is behind it
        local ms = look_ahead(member, true)
        ttl_ms = blocks and ms or ttl_ms -- it looks then itself, and it is noted for nobody
    end
    local facts = { status = parks and 'parked' or 'busy', token = key.token, holder = holder, run = its_run }
    facts.ttl_ms, facts.place, facts.since, facts.is_open = ttl_ms, place, integer(stands), is_open or nil
    return reply(facts)
end

local function my_place()
    local of = run ~= '' and record(run)
    return of and tonumber(of.p) or (arrival > 0 and place_of(arrival)) or 0
end

-- Answers a run that may run, but not yet, and not beside the delivery that has the key for it now.
local function answer_put_off(holder, for_ms)
    if parks then
        put_off(run, new_record(), for_ms, envelope)
    elseif blocks then
        strike(member)
    end
    local facts = { status = parks and 'parked' or 'busy', token = key.token, holder = holder, run = run }
    facts.ttl_ms, facts.place = math.ceil(for_ms), -1
    return reply(facts)
end

-- Gives back what is reserved for the run, and what was handed to the owner before it said its run.
local function leave_all(mine, reserved)
    if reserved then
        vacate(reserved)
    end
    if mine and mine.run ~= run then
        vacate(mine)
    end
    hand_on()
end

-- Answers a run whose turn came, but whose other delivery was before.
local function answer_second(mine, reserved)
    if not reserved and not (mine and run ~= '' and mine.run ~= run) then
        return nil
    end
    local other = held_by(run)
    local ended, settles = nil, nil
    if repeated and not (reserved and record(run)) then -- of one that has ended nothing is kept
        ended, settles = ends_of(run)
    end
    if not (ended or (settles and settles > now_ms) or (other and other ~= mine)) then
        return nil
    end
    leave_all(mine, reserved)
    if other then
        return answer_put_off(other.owner, other.ends - now_ms)
    end
    return answer_ended()
end

-- Counts the start of one that has come: the one reserved for it, or one now.
local function begin(before, had_start)
    if not (had_start and begin_start(before, owner, now)) and (want.terms or limit_now().rates) then
        start(owner, want.terms, now, now)
    end
end

-- Answers one that has it: a request is repeated, or a blocked waiter comes for what it was handed.
local function answer_mine(mine, reserved)
    if not mine then
        return nil
    end
    if reserved and reserved ~= mine then
        vacate_twin(reserved)
    end
    local comes, before = mine.stage == RESERVED, mine.run
    if comes and claim_opens(mine, want) then
        arrival = mine.place -- it has its place again
        vacate(mine)
        leaves = true
        return nil
    end
    local had_start = string.find(mine.flags, STARTS, 1, true)
    local slot = mine.slot
    if comes or (mine.units > 0 and mine.run ~= run) then
        pass(mine, owner, run == '' and mine.run or run, lease_ms, HELD)
    elseif mine.run ~= run and run ~= '' then
        mine.run = run
        lengthen(mine, lease_ms)
    else
        lengthen(mine, lease_ms)
    end
    if comes then
        begin(owner, had_start) -- an operator says only since then, perhaps, how often that may be
    elseif want.terms and not key.start then
        start(owner, want.terms, now, now) -- a script was cut short, which had granted it
    end
    if run ~= '' and before ~= run then
        arrive(run, mine, keep, lease_ms) -- a blocked waiter was granted it without
    end
    return granted(key.token, slot)
end

-- Answers a run that comes for what is reserved for it, if that is what it wants now, and the key is
-- open to it; else gives that back, so that the run has its place again.
local function answer_claim(reserved)
    if not reserved then
        return nil
    elseif mode == 'line' then
        return reply({ status = 'done' }) -- parked before, by a request that was repeated: its message is on its way
    end
    local of = record(run)
    local is_right = is_wanted(reserved, want, of and (of.w or '') or nil)
    local closed = is_right and claim_opens(reserved, want)
    if not is_right or closed then
        arrival = reserved.place > 0 and reserved.place or closed and FIRST or arrival
        vacate(reserved)
        leaves = true
        return nil
    end
    local had_start = string.find(reserved.flags, STARTS, 1, true)
    local before = reserved.owner
    pass(reserved, owner, run, lease_ms, HELD)
    begin(before, had_start)
    arrive(run, reserved, keep, lease_ms)
    if mode == 'park' then
        expect_again(reserved) -- parked by an earlier request, whose answer was lost, and woken since
    end
    return granted(key.token, reserved.slot)
end

local function granted(token, slot)
    if want.capacity == 1 and slot < 0 then
        return token
    end
    hand_on() -- beside it, others may enter as well
    return answer_granted(token, slot)
end

-- Answers one whose turn it is, after those before it have had theirs.
local function answer_turn(stands)
    local overtakes = make_room(stands, want, RESERVED .. KEPT)
    if key.alone then
        return nil
    end
    local of = run ~= '' and record(run)
    local is_free = key.count == 0 and key.rest <= now_ms
    local straight = want.capacity == 1 and is_free and of and is_in_woken[of.s]
    local turn = 'empty'
    if not (overtakes or straight) then
        turn = hand_on({ member = member, parked = 'p:' .. run, stands = stands })
    end
    local served = not key.alone and grant_of(owner) -- it waits as well, and was handed it just now
    if served then
        local had_start = string.find(served.flags, STARTS, 1, true)
        pass(served, owner, run, lease_ms, HELD)
        begin(owner, had_start)
        return granted(key.token, served.slot)
    elseif turn == 'closed' or opens(want) then
        return nil
    end
    local token, slot = take(owner, run, lease_ms, want, stands > 0 and stands or now)
    if not token then
        return slot
    end
    if of then
        strike('p:' .. run) -- it had stepped back
        arrive(run, grant_of(owner), keep, lease_ms)
    end
    if blocks then
        strike(member)
    end
    return granted(token, slot)
end

-- When time alone lets one enter that does not queue, if nobody waits.
local function look_early(place)
    if leaves and place > 0 then
        note_look(LOOK_MS) -- whoever waits before it may have what it leaves, and was told nothing
    end
    local ms = place == 0 and opens_by_rate(want)
    if ms then
        note_look(ms)
    end
end

local told = take_free_key()
if told then
    return told
end
look_at_all()
local mine, reserved = grant_of(owner), grant_for(run)
if reserved and blocks then
    strike(member) -- it waited, and comes by what is reserved for its run
end
if mine or reserved then
    told = answer_second(mine, reserved) or answer_mine(mine, reserved) or answer_claim(reserved)
end
told = told or answer_copy()
if told then
    return told
end
local stands = my_place()
if mode ~= 'line' then
    told = answer_turn(stands)
end
return told or answer_wait(stands)
