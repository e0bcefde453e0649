-- acquire.lua: take the key, or join its queue, or learn who holds it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms run arrival [want request envelope]
-- returns token: granted | {'granted', token, slot}: granted a part of it | as queue.lua's `reply`, with
--         status: granted, with token and slot: granted, and others are let in | done | busy or parked,
--         with the facts below
--
-- holder    one holder, with its run, the token, and ttl_ms, until its lease ends
-- place     how many stand before it; -1: it does not stand in the queue, and waits for its first
--           delivery to end
-- since     when it came, or 0
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
-- USES grant coming units queue

local owner, lease_ms, run, arrival, want, request, envelope = unpack(ARGV)
request = request and cjson.decode(request) or {}
want = want ~= '' and want or nil
local mode, repeated, keep = request.mode or 'try', request.repeated, request.keep

local asks = mode == 'try' or mode == 'wait'
if asks and not (repeated or want) and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0 then
    -- Nobody holds it, nobody waits: most requests end here.
    local token, refused = grant(microseconds(), owner, run, lease_ms)
    return refused or token
end

local member = '' -- of the queue
if mode == 'wait' then
    member = 'b:' .. request.inbox .. ' ' .. owner
elseif run ~= '' then
    member = 'p:' .. run
end

if asks and not (repeated or want or keep) then
    local token = come_for_it(owner, run, lease_ms, mode == 'wait' and member or '')
    if token then
        return token
    end
end

local units, capacity, terms = want_in(want)
local now = microseconds()
local own = 'parked:' .. run
if asks and not repeated and capacity ~= 1 and redis.call('EXISTS', QUEUE, TASKS) == 0 then
    -- Nobody waits, and no operator has set a limit: most who share a key end here.
    local mine, runs = 'h:' .. owner, run ~= '' and 'o:' .. run or 'h:' .. owner
    local found = redis.call('HMGET', LOCK, mine, runs, unpack(COUNTED))
    local is_new = not (found[1] or found[2])
    local known = { unpack(found, 3) }
    no_tasks = true
    local is_exact = not known[1] or (known[1] == SHARED and (tonumber(known[7] or 0) or 0) > now / 1000)
    is_exact = is_exact and known[3] ~= '0' -- else it has rested, and a new phase begins
    if is_new and is_exact and admits(units, capacity, now, terms, known) then
        local token, slot = admit(now, owner, run, lease_ms, units, capacity, 0, known)
        if token then
            start(owner, terms, now, now)
        end
        return token and { 'granted', token, slot } or slot
    end
    no_tasks = false
end

prune(now)

-- What one is told who has it; beside others, with whom that lets in.
local function granted(token, slot, is_handed_on)
    if capacity == 1 and slot < 0 then
        return token
    end
    if not (is_handed_on or woken[1]) then
        hand_on(now, '', 0)
    end
    return answer_granted(token, slot)
end

local function keep_envelope()
    redis.call('HSET', TASKS, 'e:' .. run, envelope or '', 'h:' .. run, request.channel or '')
    if request.task then
        redis.call('HSET', TASKS, 't:' .. run, request.task)
    end
end

-- What is told of a run that may run, but not yet, and not beside who has the key for it now.
local function put_off(token, holder, for_ms)
    local status = 'busy'
    if not asks then
        keep_envelope()
        redis.call('HDEL', TASKS, 'n:' .. run, 'd:' .. run)
        set_aside(run, for_ms, now)
        status = 'parked'
    end
    local facts = { status = status, token = token, holder = holder, run = run }
    facts.ttl_ms, facts.place = math.ceil(for_ms), -1
    return facts
end

-- What a second delivery is told; nothing if it may run.
local function second_delivery()
    if redis.call('ZSCORE', DONE, run) then
        return { status = 'done' }
    end
    local until_ms = redis.call('ZSCORE', DONE, '~' .. run)
    local held_back = until_ms and tonumber(until_ms) - now / 1000
    if held_back and held_back > 0 then
        -- The first one's result is being stored; if that does not come to pass, this one runs.
        local status = 'busy'
        if not asks then
            keep_envelope()
            redis.call('ZADD', WOKEN, until_ms, run)
            status = 'parked'
        end
        return { status = status, run = run, ttl_ms = math.ceil(held_back), place = -1 }
    end
end

-- Whether what is kept for the run is what it wants now, as it may have changed its mind.
local function is_wanted(share)
    if not share or capacity == 1 then
        return not share and capacity == 1
    end
    if redis.call('HGET', TASKS, 'w:p:' .. run) == want then
        return true
    end
    local used = tonumber(redis.call('HGET', LOCK, 'used') or 0)
    return (capacity == 0 or used <= capacity) and needed(units, capacity) <= share.units
end

local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run', 'due')
local holder = held[1]
local share = holder == SHARED and share_of(owner)
local kept = holder == SHARED and run ~= '' and share_of(own)
local has = holder == owner or share
local claims = run ~= '' and (holder == own or kept)
local has_run = share and share.run or held[3]

-- Gives up what is kept for the run, and what was handed to the owner before it said which run it is.
local function leave_all()
    if claims then
        vacate(own, now)
    end
    if has and has_run ~= run then
        vacate(owner, now)
    end
end

if claims and mode == 'wait' then
    strike(member) -- it waited, and comes by what is kept for its run
end
if (claims or (has and run ~= '' and has_run ~= run)) and repeated then
    local told = second_delivery()
    if told then -- its turn came, but the first one has ended
        leave_all()
        hand_on(now, '', 0)
        return reply(told)
    end
end
local runs_by = run ~= '' and redis.call('HGET', LOCK, 'o:' .. run)
if runs_by == owner or runs_by == own or holder ~= SHARED then
    runs_by = nil
end
if runs_by and (claims or (has and has_run ~= run)) and share_of(runs_by) then
    -- Both deliveries of the run were served, and the other one has come first.
    leave_all()
    hand_on(now, '', 0)
    return reply(put_off(held[2], runs_by, share_of(runs_by).ends - now / 1000))
end
if has then
    if kept then
        vacate(own, now) -- a run has one part, and was handed this one as well
    end
    local was_due = share and share.due > 0
    if share then
        local same_run = run == '' and share.run or run
        pass_on(owner, share, owner, same_run, lease_ms, now)
    else
        lengthen(lease_ms)
    end
    local comes = was_due or (not share and redis.call('HDEL', LOCK, 'due') == 1)
    if not begin_start(owner, owner, now) and comes then
        start(owner, terms, now, now) -- an operator says only since then how often that may be
    end
    if run ~= '' and has_run ~= run then
        if not share then
            redis.pcall('HSET', LOCK, 'run', run)
        end
        arrive(now, run, keep, lease_ms) -- a blocked waiter was granted it without
    end
    return granted(held[2], share and share.slot or -1)
end
if claims and mode == 'line' then
    -- Likewise parked before, by a request that was repeated: its message is on its way as well.
    return reply({ status = 'done' })
end
local leaves = false -- for now, what was kept for it
local too_early = claims and starts_in(terms, now) > 0 and not keeps_start_for(run)
if claims and (too_early or not is_wanted(kept)) then
    local due = kept and kept.due or tonumber(held[4] or 0)
    vacate(own, now)
    leaves = true
    arrival = due > 0 and due or too_early and FIRST or tonumber(arrival)
    holder = redis.call('HGET', LOCK, 'owner')
elseif claims then
    local token, slot = claim(now, owner, run, keep, lease_ms, terms)
    if mode == 'park' then
        -- It was parked by an earlier request of ours, whose answer was lost, and has been woken
        -- since: its message is on its way as well.
        redis.call('HSET', LOCK, kept and 'again:' .. run or 'again', 1)
    end
    return granted(token, slot)
end

-- Who parks may have been parked before, by a request whose answer was lost.
if repeated or not asks then
    local told = second_delivery()
    if told then
        if mode == 'wait' then
            strike(member)
        end
        return reply(told)
    end
end
local runs, left_ms = false, 0
if run ~= '' and holder == SHARED then
    runs, left_ms = holds(run, now)
end
if runs then
    if mode == 'wait' then
        strike(member)
    end
    return reply(put_off(held[2], redis.call('HGET', LOCK, 'o:' .. run), left_ms))
end

local stands = tonumber(redis.call('HGET', TASKS, 's:' .. run)) or place_of(tonumber(arrival), now)
local overtakes = holder and holder ~= SHARED and stands > 0 and stands < (tonumber(held[4] or 0) or 0)
overtakes = overtakes and (holder == 'parked:' .. held[3] or redis.call('PTTL', LOCK) <= GRANT_MS)
if overtakes and mode ~= 'line' then
    -- It was handed to one who came later, and has not come for it: who is here goes before.
    step_back(now, holder, held[4])
    holder = redis.call('HGET', LOCK, 'owner')
elseif holder == SHARED and mode ~= 'line' and may_make_room(stands) and not admits(units, capacity, now, terms) then
    overtakes = make_room(now, stands, units, capacity, terms)
end
if (not holder or holder == SHARED) and mode ~= 'line' then
    local last
    local straight = capacity == 1 and not holder and run ~= '' and redis.call('ZSCORE', WOKEN, run)
    if not overtakes and not straight then
        coming = run -- it may stand there twice, parked and blocked
        last = hand_on(now, member, stands)
    end
    local served = share_of(owner) -- it stands in the queue as well, and was handed it just now
    if served then
        pass_on(owner, served, owner, run, lease_ms, now)
        begin_start(owner, owner, now)
        return granted(held[2] or redis.call('HGET', LOCK, 'token'), served.slot, true)
    end
    if (last == nil or last == true) and admits(units, capacity, now, terms) then
        local came = stands > 0 and stands or now
        local token, slot = take(now, owner, run, lease_ms, units, capacity, terms, came)
        if not token then
            return slot
        end
        if run ~= '' then
            arrive(now, run, keep, lease_ms)
        end
        if member ~= '' then
            strike(member)
        end
        return granted(token, slot)
    end
end

local status = 'busy'
if mode ~= 'try' then
    if stands == 0 then
        local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
        stands = math.max(now, tonumber(last or '0') + 1)
    end
    if mode ~= 'wait' then
        keep_envelope()
        redis.call('HSET', TASKS, 's:' .. run, integer(stands))
        redis.call('HDEL', TASKS, 'n:' .. run, 'd:' .. run)
        status = 'parked'
    end
    redis.call('ZADD', QUEUE, 'NX', integer(stands), member)
    note_want(member, want)
    if mode ~= 'wait' then
        redis.call('ZREM', WOKEN, run) -- only then: a script may be broken off
    end
    stands = tonumber(redis.call('ZSCORE', QUEUE, member))
end
local owned_by, token, held_for = one_holder()
local place = redis.call('ZRANK', QUEUE, member) or redis.call('ZCARD', QUEUE)
local ttl_ms = redis.call('PTTL', LOCK)
local next_ms = tonumber(redis.call('HGET', LOCK, 'next') or EXACT) or EXACT
if ttl_ms <= 0 or next_ms < now / 1000 + ttl_ms then
    -- Nobody has it, and nobody may; or one of several ends before the others.
    ttl_ms = ttl_ms <= 0 and LOOK_MS or math.max(0, math.ceil(next_ms - now / 1000))
end
local may_open = not holder or holder == SHARED or string.find(holder, 'parked:resting:', 1, true) == 1
may_open = may_open and not (mode == 'line' and admits(units, capacity, now, terms))
if mode ~= 'try' and place == 0 and may_open then
    opens_ms = nil -- the one that was the first is behind this one
    look_ahead(now, member, true)
    if opens_ms and mode == 'wait' then
        ttl_ms = opens_ms -- it looks then itself, and that is noted for no other
    end
end
local early_ms = mode == 'try' and place == 0 and opens_by_rate(now, units, capacity, terms)
if leaves and mode == 'try' and place > 0 then
    early_ms = LOOK_MS -- whoever stands before it may have what it leaves, and was told nothing
end
if early_ms then
    look_in(early_ms)
end
local facts = { status = status, token = token, holder = owned_by, run = held_for }
facts.ttl_ms, facts.place, facts.since = ttl_ms, place, integer(stands)
return reply(facts)
