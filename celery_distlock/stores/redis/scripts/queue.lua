-- queue.lua: the hand-over of a free key to the next in its queue.
-- KEYS lock queue tasks woken fence done rate
-- USES times lining

local LAST_RESENDS = 30 -- days; then the run is forgotten, its messages are the broker's
local LOOK_MS = 1000 -- until one looks again who waits for a key that nobody may enter
local SOONER_MS = 10 -- than one knows that it may enter, for it to be called anew
local MOST_GRANTS = 100 -- by one script; who is let in by it goes on when it comes
local FIRST = 1 -- µs: when one came before whom nobody is to go
local AHEAD = 1000000 -- µs that others' clocks may be: nobody comes later than that
local DONE_MS = 3600000 -- how long a late second delivery is recognised; longer than all resends

local MOST_BEFORE = 8 -- calls that are looked at to find one before which another may not go

local coming = '' -- the run for which somebody is here, where it stands in the queue itself
local givers = '' -- the runs that give the key up, or have; a line each

-- Whether the broker has an earlier call of the same destination, which this one passes unless it goes
-- the same way. Those that it has are sent again last of all.
local function follows_another(run, arrival, sent_to)
    if not sent_to or redis.call('ZCARD', WOKEN) < 2 then
        return false
    end
    for _, other in ipairs(redis.call('ZRANGE', WOKEN, 0, MOST_BEFORE, 'REV')) do
        local its_arrival, its_place = unpack(redis.call('HMGET', TASKS, 's:' .. other, 'q:' .. other))
        local is_before = (tonumber(its_arrival) or 0) < (tonumber(arrival) or 0)
        if is_before and its_place == sent_to and is_with_broker(other) then
            return true
        end
    end
    return false
end

-- Pushes a run to the worker that parked it, or takes what is sent so; false if that is gone.
local function push(run, envelope)
    local known = redis.call('HMGET', TASKS, 'h:' .. run, 's:' .. run, 'q:' .. run)
    local channel, arrival, sent_to = unpack(known)
    channel = channel_of(channel, sent_to)
    if not channel or channel == '' or follows_another(run, arrival, sent_to) then
        return false
    end
    return deliver(channel, run, arrival, givers, envelope)
end

local function want_of(member)
    return want_in(redis.call('HGET', TASKS, 'w:' .. member))
end

local function note_want(member, want)
    if want and want ~= '' then
        redis.call('HSET', TASKS, 'w:' .. member, want)
    else
        redis.call('HDEL', TASKS, 'w:' .. member)
    end
end

-- The place of one who came at `arrival`, but no later than the clock says. Where those who wait came
-- later than that, it was set back since: who comes now is behind them all the same.
local function place_of(arrival, now)
    local last = tonumber(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0)
    if arrival > FIRST and last > now + AHEAD then
        return arrival > now + AHEAD and arrival or last + 1
    end
    return math.min(arrival, now + AHEAD)
end

-- Takes one out of the queue who has no place there any more; true if it was there.
local function strike(member)
    redis.call('HDEL', TASKS, 'w:' .. member)
    return redis.call('ZREM', QUEUE, member) == 1
end

-- Puts a run that waits before all who do; false: it does not wait.
local function put_first(run)
    if not redis.call('ZSCORE', QUEUE, 'p:' .. run) then
        return false
    end
    redis.call('ZADD', QUEUE, 'XX', FIRST, 'p:' .. run)
    redis.call('HSET', TASKS, 's:' .. run, FIRST)
    return true
end

-- Grants so much to one whose turn it is. Returns the token and the slot, or nothing and the refusal.
local function take(now, owner, run, lease_ms, units, capacity, terms, came)
    local token, slot
    if capacity ~= 1 then
        token, slot = admit(now, owner, run, lease_ms, units, capacity, 0)
    else
        token, slot = grant(now, owner, run, lease_ms)
        slot = token and -1 or slot
    end
    if token then
        start(owner, terms, now, came)
    end
    return token, slot
end

-- Grants so much to one who has to come for it, and who came at `arrival`; false: refused.
local function reserve(now, owner, run, arrival, for_ms, units, capacity, terms)
    if capacity ~= 1 then
        if not admit(now, owner, run, for_ms, units, capacity, tonumber(arrival)) then
            return false
        end
    elseif grant(now, owner, run, for_ms) then
        redis.call('HSET', LOCK, 'due', arrival)
    else
        return false
    end
    if reserve_start(owner, terms, now, tonumber(arrival)) and capacity == 1 then
        redis.pcall('HSET', LOCK, 'rated', 1)
    end
    return true
end

-- Takes the key from one who was handed it and has not come, and gives a run its place back.
local function step_back(now, holder, arrival)
    vacate(holder, now)
    local run = string.match(holder, '^parked:(.*)$')
    if run and redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        redis.call('ZADD', QUEUE, 'NX', arrival, 'p:' .. run)
    end
end

-- Whether somebody may have been handed a part of the key who came after `stands`.
local function may_make_room(stands)
    return stands > 0 and stands < (tonumber(redis.call('HGET', LOCK, 'due') or 0) or 0)
end

-- Has those step back who came after `stands` and have not come for what they were handed, the last
-- one first, until so much may be taken; false: it may not all the same.
local function make_room(now, stands, units, capacity, terms)
    local later = {}
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local owner = string.match(fields[i], '^h:(.*)$')
        local share = owner and read(fields[i + 1])
        if share and share.due > stands then
            later[#later + 1] = { owner, share.due }
        end
    end
    table.sort(later, function(one, other)
        return one[2] > other[2]
    end)
    for _, each in ipairs(later) do
        step_back(now, each[1], integer(each[2]))
        if admits(units, capacity, now, terms) then
            return true
        end
    end
    return false
end

-- Has a run stand in the queue no more, which is to be sent at a time (ms). A script may be broken
-- off, so there is no moment at which it stands nowhere.
local function take_out(run, at_ms)
    redis.call('ZADD', WOKEN, integer(at_ms), run)
    redis.call('ZREM', QUEUE, 'p:' .. run)
end

local woken = {} -- of the answer: the runs that its reader is to send, each with what it has to know
local envelopes = {} -- theirs
local opens_ms -- in how many ms time alone lets a request in; nothing: it does not

-- Has the reader of the answer send a run.
local function note_woken(run, envelope, more)
    local entry = more or {}
    entry.run = run
    woken[#woken + 1], envelopes[#envelopes + 1] = entry, envelope
end

-- Returns an answer of named fields, with the runs that its reader is to send. Their envelopes come
-- after it: they may be large, and of any bytes.
local function reply(fields)
    fields.opens_ms = opens_ms
    if woken[1] then
        fields.woken = woken
    end
    return { named(fields), unpack(envelopes) }
end

-- Returns a status, alone if no run was woken and time opens nothing.
local function answer(status)
    return (woken[1] or opens_ms) and reply({ status = status }) or status
end

-- Returns the answer to a request that was granted a part of the key.
local function answer_granted(token, slot)
    if woken[1] or opens_ms then
        return reply({ status = 'granted', token = token, slot = slot })
    end
    return { 'granted', token, slot }
end

-- Puts a run on its way to its key: it is pushed, or the reader of the answer sends it.
local function wake(now, run, envelope)
    take_out(run, now / 1000 + UNSENT_MS)
    if not push(run, envelope) then
        note_woken(run, envelope)
    end
end

-- How long the key is kept for a run that is put on its way.
local function claim_ms()
    return claim_ms_of(redis.call('ZCARD', WOKEN))
end

-- The first who is blocked here, and when he came. Lua gets those alone, not all who wait.
local function first_blocked()
    local cursor, first, came = '0', nil, math.huge
    repeat
        local found
        cursor, found = unpack(redis.call('ZSCAN', QUEUE, cursor, 'MATCH', 'b:*', 'COUNT', 1000))
        for i = 1, #found, 2 do
            local arrival = tonumber(found[i + 1])
            if arrival < came or (arrival == came and found[i] < first) then
                first, came = found[i], arrival
            end
        end
    until cursor == '0'
    return first, first and redis.call('ZSCORE', QUEUE, first)
end

-- Keeps the free key for a run that needs others, too, and is not to be sent before it has them all;
-- it stays the first in the queue.
local function keep_for(now, run, arrival, for_ms, units, capacity, terms)
    redis.call('HSET', TASKS, 'l:' .. run, 1)
    if not reserve(now, 'parked:' .. run, run, arrival, for_ms, units, capacity, terms) then
        return false
    end
    if givers ~= '' then
        redis.call('HSET', LOCK, 'from:' .. run, givers)
    end
    return true
end

-- Lets a second delivery, which may not run beside the first one, keep nobody else from entering.
local function set_aside(run, for_ms, now)
    redis.call('ZREM', QUEUE, '') -- a full server refuses a script's first write, but not this one
    take_out(run, now / 1000 + for_ms)
end

-- Gives the key to one waiter: a run that is sent, or pushed. Returns as `hand_over`. One that needs
-- other keys, too, is noted with all that it needs instead of its envelope.
local function hand_to_run(now, head, run, arrival, kept, units, capacity, terms)
    local envelope, names = kept[1], kept[2]
    local own = 'parked:' .. run
    if names then
        if not keep_for(now, run, arrival, UNSENT_MS, units, capacity, terms) then
            return false
        end
        note_woken(run, '', { route = names })
        return 'handed'
    end
    if not reserve(now, own, run, arrival, claim_ms(), units, capacity, terms) then
        return false
    end
    if redis.call('ZSCORE', WOKEN, run) then
        redis.call('ZREM', QUEUE, head) -- it stepped back, and is on its way already
    else
        wake(now, run, envelope)
    end
    return 'handed'
end

-- Or one that is blocked; nothing: it is gone.
local function hand_to_blocked(now, head, arrival, units, capacity, terms)
    local inbox, owner = string.match(head, '^b:(%S+) (.+)$')
    local heard = inbox and publish(inbox, owner) or 0
    if type(heard) == 'number' and heard == 0 then
        return nil
    end
    if not reserve(now, owner, '', arrival, GRANT_MS, units, capacity, terms) then
        return false
    end
    strike(head)
    return 'handed'
end

local function look_in(in_ms)
    opens_ms = math.min(opens_ms or in_ms, in_ms)
end

-- Has the first who is blocked look at a key with a rate, once; it learns then when to look again,
-- and needs nobody who looks after what becomes due. Who is here himself is told anyway.
local function call_first(now, member, in_ms, is_here)
    local inbox, owner = string.match(member, '^b:(%S+) (.+)$')
    if not inbox or redis.call('EXISTS', RATE) == 0 then
        return
    end
    local looks_ms, known = string.match(redis.call('HGET', RATE, 'looks') or '', '^(%d+) (.*)$')
    local at_ms = now / 1000 + in_ms
    if not is_here and known == member and tonumber(looks_ms) <= at_ms + SOONER_MS then
        return
    end
    redis.pcall('HSET', RATE, 'looks', integer(at_ms) .. ' ' .. member)
    if not is_here then
        publish(inbox, owner)
    end
end

-- Tells when time alone lets the first of those who wait enter, or who is next, if it may not now.
local function look_ahead(now, member, is_here)
    member = member or first_in_line()
    local in_ms = member and opens_in(now, member)
    if in_ms then
        look_in(in_ms)
        call_first(now, member, in_ms, is_here)
    end
end

-- Gives the key to the first waiter that is alive, if it may have it. Returns nothing if there is
-- none, true if that is `own`, or one who stands there since `stands` (0: nobody), false if it has
-- to wait, else 'handed'.
local function hand_over(now, own, stands)
    local passed = 0
    while true do
        local head, arrival = unpack(redis.call('ZRANGE', QUEUE, passed, passed, 'WITHSCORES'))
        if not head then
            return nil
        end
        local name, kept = string.sub(head, 3), {}
        local is_run = string.sub(head, 1, 2) == 'p:'
        if is_run then
            kept = redis.call('HMGET', TASKS, 'e:' .. name, 'k:' .. name, 'l:' .. name)
        end
        local stays = kept[2] and keeps_for(name)
        if kept[3] and not stays then
            -- It had its turn, and still waits for another key. If who has that is blocked here, the
            -- two would wait for ever: so one who is goes before, this time.
            redis.call('HDEL', TASKS, 'l:' .. name)
            local blocked, since = first_blocked()
            if blocked then
                head, arrival, is_run = blocked, since, false
            end
        end
        local is_here = head == own or (is_run and name == coming)
        if is_here or (stands > 0 and stands < tonumber(arrival)) then
            return true
        end
        local runs, left_ms = false, 0
        if is_run then
            runs, left_ms = holds(name, now)
        end
        if stays then
            passed = passed + 1 -- it has its part here, and waits for another key
        elseif runs then
            set_aside(name, left_ms, now)
        elseif is_run and not kept[1] then
            redis.call('ZREM', QUEUE, head)
        else
            local units, capacity, terms = want_of(head)
            if not admits(units, capacity, now, terms) then
                look_ahead(now, head)
                return false
            end
            if is_run then
                return hand_to_run(now, head, name, arrival, kept, units, capacity, terms)
            end
            local handed = hand_to_blocked(now, head, arrival, units, capacity, terms)
            if handed ~= nil then
                return handed
            end
            strike(head)
        end
    end
end

-- Has one who waits for having the key alone, and shares it with nobody any more, have it so. True:
-- there is one, whether it has to wait or not.
local function settle_upgrade(now)
    local up, holders = unpack(redis.call('HMGET', LOCK, 'up', 'holders'))
    if not up then
        return false
    end
    local owner, inbox = upgrading(up)
    if not (owner and share_of(owner)) then
        redis.call('HDEL', LOCK, 'up') -- nobody of ours
        return false
    end
    if holders == '1' then
        convert(now, owner, 0)
        publish(inbox, owner)
    end
    return true
end

-- Gives what is free to as many of those who wait as may have it, in their order. Returns what
-- `hand_over` says of the last one.
local function hand_on(now, own, stands)
    local holder = redis.call('HGET', LOCK, 'owner')
    if (holder and holder ~= SHARED) or settle_upgrade(now) then
        return false
    end
    local last
    for _ = 1, MOST_GRANTS do
        last = hand_over(now, own, stands)
        if last ~= 'handed' or redis.call('HGET', LOCK, 'owner') ~= SHARED then
            break
        end
    end
    return last
end

-- Whether a woken run has not come to its key yet, as far as is known.
local function on_its_way(run)
    local now = microseconds()
    local has_come = holds(run, now)
    local ends_ms = tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0)
    local ends = ends_ms > now / 1000 -- else it is taken for dead
    return not has_come and not ends and redis.call('ZSCORE', WOKEN, run)
end

-- Gives what an owner has of the key to the next in its queue.
local function free(owner)
    local now = microseconds()
    vacate(owner, now)
    hand_on(now, '', 0)
end

-- Remembers an end. At maxmemory, too: a full server refuses only the first write of a script, so
-- one that it never refuses goes before.
local function note_end(member, now_ms, at_ms)
    redis.call('ZREMRANGEBYSCORE', DONE, '-inf', integer(now_ms - DONE_MS))
    redis.pcall('ZADD', DONE, integer(at_ms), member)
    local left_ms = math.max(DONE_MS, at_ms - now_ms, redis.call('PTTL', DONE))
    redis.call('PEXPIRE', DONE, integer(left_ms))
end

local function record_end(run)
    local now_ms = microseconds() / 1000
    local until_ms = tonumber(redis.call('ZSCORE', DONE, '+' .. run) or 0) or 0
    note_end(run, now_ms, math.max(now_ms, until_ms))
    redis.call('ZREM', DONE, '~' .. run, '+' .. run) -- only then: a script may be broken off
end

-- Keeps a second delivery from running while the first one's result is on its way to be stored: for
-- as long as its lease would have lasted, if its process died now.
local function hold_back(run)
    local now = microseconds()
    local runs, left_ms = holds(run, now)
    local now_ms = now / 1000
    local until_ms = now_ms + math.max(runs and left_ms or 0, CLAIM_MS)
    note_end('~' .. run, now_ms, until_ms)
    if redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        take_out(run, until_ms)
    end
end

-- Notes that a run has come to its key; with `keep` its message stays here until the run has ended.
local function arrive(now, run, keep, lease_ms)
    if keep and redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        set_aside(run, lease_ms, now)
        redis.call('HSET', TASKS, 'n:' .. run, -1) -- if it is sent again, it says so
    else
        unpark(run)
    end
end

-- Gives a run what is kept for it; returns the token and the slot.
local function claim(now, owner, run, keep, lease_ms, terms)
    local own = 'parked:' .. run
    local token, holder = unpack(redis.call('HMGET', LOCK, 'token', 'owner'))
    local slot = -1
    if holder == SHARED then
        local share = share_of(own)
        slot = share.slot
        pass_on(own, share, owner, run, lease_ms, now)
    else
        redis.call('PEXPIRE', LOCK, lease_ms) -- first: a full server refuses what begins with HSET
        redis.call('HSET', LOCK, 'owner', owner)
        redis.call('HDEL', LOCK, 'due', 'from:' .. run)
        outlive_rest(now)
    end
    if not begin_start(own, owner, now) then
        start(owner, terms, now, now)
    end
    arrive(now, run, keep, lease_ms)
    return token, slot
end

-- Keeps what is kept for a run for longer, or for shorter where nobody shares the key.
local function keep_longer(now, run, for_ms)
    local own = 'parked:' .. run
    local share = redis.call('HGET', LOCK, 'owner') == SHARED and share_of(own)
    if share then
        share.ends = math.max(share.ends, math.ceil(now / 1000) + for_ms)
        begin_to_write()
        write_share(own, share)
        outlive(share.ends, now)
    else
        redis.call('PEXPIRE', LOCK, for_ms)
        outlive_rest(now)
    end
end

-- Removes a run from a key that is reserved for it; at its first key it is dispatched.
local function depart(now, run, is_first)
    keep_longer(now, run, claim_ms())
    local from = redis.call('HGET', LOCK, 'from:' .. run)
    if from then
        givers = givers == '' and from or givers .. '\n' .. from
    end
    if not is_first then
        unpark(run)
        return
    end
    local envelope = redis.call('HGET', TASKS, 'e:' .. run)
    if redis.call('HDEL', TASKS, 'k:' .. run, 'l:' .. run) > 0 and envelope then
        wake(now, run, envelope) -- else an earlier request did, and its answer was lost: a sweep sends it
    end
end
