-- runs.lua: the state of a run. Only go() changes it.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- tasks  e:<run> the envelope; r:<run> a JSON object: s state; p arrival (µs); w want; t name of the task;
--        h delivery channel of the worker that parked it; q destination of a call through the store;
--        o destination of a message that was parked, for display; i identity that it was sent with;
--        n times that the broker was given it since it was parked; d pushes to workers that had not
--        parked it, PUSHES if the broker has it; c it has claimed its key since it was parked; x the
--        broker may have two of its messages; y it was queued again while in flight; u time was all that
--        it waited for when it was last seen as the head of the queue; r a newer call has its identity: 1 it
--        is asked to leave when it begins, 2 it was, and does not begin again. If it needs several
--        keys: k the route (Route.written()); at the name of the key where it waits; v attempts that
--        failed, and f the time of the first (ms). Its envelope is at the first key. At the key where it
--        waits, and at keys that are kept for it, there is a record with b and without an envelope.
--
-- state      found in  what happens when its time has come
-- later      later     it joins the queue
-- waiting    queue
-- woken      woken     it is sent again
-- running    woken     it is sent again; only runs whose message the store alone has
-- settling   woken     it is sent again; its body has ended, its result is not stored yet
-- elsewhere  -         at the first of several keys, while it waits at another one
-- kept       -         at a key that is kept for it, while it waits at another one
-- USES records grants lanes

local UNSENT_MS = 2000 -- for a woken run to be received from the channel, or to be sent
local CLAIM_MS = 5000 -- for a woken run's message to reach a worker; doubled by others in flight
local DOUBLINGS = 2 -- at most, so that an unclaimed key is not idle for longer
local DONE_MS = 3600000 -- how long a late second delivery is recognised; longer than all resends
local DAY_MS = 86400000
local COPIES_MS = 31 * DAY_MS -- for which the broker may keep a message; longer than all resends
local SPARE_MS = 360000 -- by which an expiry is set later than needed, so that it is set rarely
local TRIM = 16 -- one of this many calls removes the ends that have expired
local RESEND_MS = 60000 -- after which a message that did not arrive is sent again; doubles
local RESENDS = 4 -- with doubling; then once a day, in case the broker lost the message
local LAST_RESENDS = 30 -- days; then the run is forgotten, and left to the broker
local PUSHES = 5 -- without effect; from then on the run goes through the broker only
local FIRST = 1 -- arrival (µs) of a run that must be the head of the queue
local AHEAD = 1000000 -- µs that an arrival may be ahead of this clock
local TIES = 1000 -- µs within which requests are in the order of their arrival, whatever they are ahead
local STRICT_MS = 2 * DAY_MS -- for which a run that is not passed has its key; extended before it ends

local function is_in_woken(state)
    return state == 'woken' or state == 'running' or state == 'settling'
end

-- Returns a run's record, or nothing.
local function record(run)
    if key.runs[run] == nil then
        local text = field('r:' .. run)
        local is_read, found = false, nil
        if text then
            is_read, found = pcall(cjson.decode, text)
        end
        key.runs[run] = is_read and type(found) == 'table' and found
    end
    return key.runs[run] or nil
end

-- Writes a run's record, and its envelope if given.
local function write_run(run, of, envelope)
    key.runs[run], key.tasks['r:' .. run] = of, nil
    local fields = { 'r:' .. run, cjson.encode(of) }
    if envelope then
        fields[3], fields[4] = 'e:' .. run, envelope
        key.tasks['e:' .. run] = envelope
    end
    redis.call('HSET', TASKS, unpack(fields))
end

-- Changes the state of a run; no other function does. Adds it to the new place before removing it from
-- the old one, so that an interrupted script leaves it in two places, never in none. `at_ms` is when the
-- sweep handles it.
local function go(run, of, state, at_ms, envelope)
    local was = of.s
    of.s, key.head = state, nil
    if state == 'waiting' then
        enqueue('p:' .. run, of.p, of.w)
    elseif at_ms then
        redis.call('ZADD', WOKEN, integer(at_ms), run)
    end
    write_run(run, of, envelope)
    local leaves = was == 'waiting' or (of.y and state == 'settling') -- it had stepped back
    if leaves and state ~= 'waiting' then
        dequeue('p:' .. run, of.p, of.w)
    elseif is_in_woken(was) and not is_in_woken(state) then
        redis.call('ZREM', WOKEN, run)
    end
end

-- Queues a run again that is in flight, at its place.
local function queue_again(run, of, place)
    enqueue('p:' .. run, integer(place), of.w)
    of.y = true
    write_run(run, of)
end

-- Returns the place of a request that arrived at `arrival` (0: now), at most the present time. If the
-- clock was set back, new requests still go behind all waiters.
local function place_of(arrival)
    local last = tonumber(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0)
    if arrival == 0 then
        return math.max(now, last + 1)
    elseif arrival > FIRST and last > now + AHEAD then
        return arrival > now + AHEAD and arrival or last + 1
    end
    return math.min(arrival, now + AHEAD)
end

-- Returns the ms that a request with this want is ahead of its arrival.
local function ahead_in(want_text)
    return tonumber(string.match(want_text or '', '^[^@]*%+(%d+)') or 0)
end

-- Returns the place of a new request. One that is ahead of its arrival goes behind those that were as much
-- ahead.
local function new_place(want_text)
    local place, ahead_ms = place_of(0), ahead_in(want_text)
    if ahead_ms == 0 then
        return place
    end
    place = math.max(FIRST + 1, place - 1000 * ahead_ms)
    local from, to = '(' .. integer(place + TIES), integer(place)
    local last = redis.call('ZRANGE', QUEUE, from, to, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2]
    return last and last + 1 or place
end

-- Returns when a run ended (ms), until when its result is being stored, until when its end must be
-- remembered, and when it was asked to leave.
local function ends_of(run)
    local found = redis.call('ZMSCORE', DONE, run, '~' .. run, '+' .. run, '!' .. run)
    return tonumber(found[1] or nil), tonumber(found[2] or nil), tonumber(found[3] or nil), tonumber(found[4] or nil)
end

-- Whether a run is new, and may not be queued because `most` or more wait.
local function is_full(run, most)
    return redis.call('ZCARD', QUEUE) >= most and not record(run)
end

-- Removes a run. Returns whether it was there.
local function forget_run(run)
    local of = record(run)
    if redis.call('HDEL', TASKS, 'r:' .. run, 'e:' .. run) == 0 then
        return false
    end
    key.runs[run], key.tasks['r:' .. run], key.tasks['e:' .. run] = false, false, false
    if not of or of.y or not is_in_woken(of.s) then
        dequeue('p:' .. run, of and of.p, of and of.w)
    end
    if not of or of.s ~= 'waiting' then
        redis.call('ZREM', WOKEN, run)
    end
    return true
end

-- Returns a counter of a run; 0 if another program wrote something else there.
local function times_in(value)
    local times = tonumber(value or 0) or 0
    return times > 0 and times < EXACT and times or 0
end

-- Whether the broker may have the run's message: it was sent, or its caller is about to send it.
local function is_with_broker(of)
    return times_in(of.d) >= PUSHES
end

-- Queues a run behind all waiters.
local function line_up(run, of, envelope)
    of.p = integer(new_place(of.w))
    go(run, of, 'waiting', nil, envelope)
end

local function claim_ms()
    return CLAIM_MS * 2 ^ math.min(redis.call('ZCARD', WOKEN), DOUBLINGS)
end

-- Ends.

-- Extends the expiry of the record of ends, a little further than asked, so that it is set rarely.
local function keep_ends(for_ms)
    if redis.call('PTTL', DONE) < for_ms then
        redis.call('PEXPIRE', DONE, integer(for_ms + SPARE_MS))
    end
end

local function note_end(member, at_ms, for_ms)
    if math.floor(now) % TRIM == 0 then
        redis.call('ZREMRANGEBYSCORE', DONE, '-inf', integer(now_ms - DONE_MS))
    end
    redis.pcall('ZADD', DONE, integer(at_ms), member)
    keep_ends(for_ms)
end

-- Records the end of a run.
local function record_end(run, is_plain)
    local settles, copied, recalled
    if not is_plain then -- plain: it was sent once, and its result is stored
        local _
        _, settles, copied, recalled = ends_of(run)
    end
    local at_ms = math.max(now_ms, copied or 0)
    note_end(run, at_ms, math.max(DONE_MS, at_ms - now_ms))
    if settles or copied or recalled then
        redis.call('ZREM', DONE, '~' .. run, '+' .. run, '!' .. run)
    end
end

-- Prevents a second delivery from running while the result is being stored: for as long as the lease
-- would have lasted if the process died now.
local function note_settling(run)
    local held = held_by(run)
    local until_ms = now_ms + math.max(held and held.ends - now_ms or 0, CLAIM_MS)
    note_end('~' .. run, until_ms, DONE_MS)
    local of = record(run)
    if of and not of.b then
        go(run, of, 'settling', until_ms)
    end
end

-- Notes that the broker may have another message of a run, which may arrive after the run's end.
local function expect_copy(run, of)
    redis.pcall('ZADD', DONE, integer(now_ms + COPIES_MS), '+' .. run)
    keep_ends(COPIES_MS)
    if of and not of.x then
        of.x = true
        write_run(run, of)
    end
end

-- Asks a run to leave: now, if it holds the key, else when it begins. Idempotent.
local function recall(run)
    local of, held = record(run), held_by(run)
    local grant = held or grant_for(run)
    if grant then
        flag(grant, RECALLED, 'n' .. clock)
    end
    if held then
        flag(grant, AGAIN) -- its end must be remembered
        note_end('!' .. run, now_ms, DONE_MS)
    end
    if of and not of.b then
        of.r = held and 2 or 1
        write_run(run, of)
    end
end

-- Notes that a run has claimed its grant. With `keep` its message stays in the store until the run has
-- ended.
local function arrive(run, grant, keep, lease_ms)
    local of = record(run)
    if of and of.x then
        flag(grant, AGAIN)
    end
    if of and of.r == 1 then
        recall(run)
    end
    if keep and of and not of.b then
        of.c, of.n = true, nil
        go(run, of, 'running', of.s ~= 'woken' and now_ms + lease_ms or nil) -- a woken run keeps its time
    elseif of then
        forget_run(run)
    end
end

