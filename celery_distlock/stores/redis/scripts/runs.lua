-- runs.lua: where a run is. It has one state, and go() alone changes it.
-- KEYS lock queue tasks woken fence done rate
--
-- tasks  e:<run> its envelope, and r:<run>, in JSON: s the state; p its arrival (µs); w its want; t its
--        task's name; h the channel of the worker that parked it; q the destination to which it was sent;
--        i the identity that it was sent with; n how often the broker was given it since it was parked;
--        d how often it was pushed to workers that had not parked it, PUSHES if the broker has it;
--        c that it has come for its key since it was parked; x that the broker may have two of its
--        messages; y that it is on its way, and stepped back into the queue. Of one that needs several keys: k all of
--        them, as Route.written() has them; at the name of the one at which it waits; v how often it
--        was turned away, and f since when (ms). Its envelope is at the
--        first; elsewhere there is an entry where it waits, or where a key is kept for it, with b and without e.
--
-- state     is found in   and what time does to it there
-- later     later         it joins the queue
-- waiting   queue
-- woken     woken         it is sent again
-- running   woken         likewise: only where the store alone has its message
-- settling  woken         likewise: its body has ended, its result is not stored
-- elsewhere               at the first of several keys, when it waits at another one
-- kept                    at a key that is kept for it, when it waits at another one
-- USES records grants

local UNSENT_MS = 2000 -- for a woken run to be taken from the channel, or to be sent
local CLAIM_MS = 5000 -- for a woken run's message to reach a worker; doubled by others on their way
local DOUBLINGS = 2 -- at most: a key that nobody comes for is not to lie idle for longer
local DONE_MS = 3600000 -- how long a late second delivery is recognised; longer than all resends
local DAY_MS = 86400000
local COPIES_MS = 31 * DAY_MS -- for which the broker may keep a message; longer than all resends
local SPARE_MS = 360000
local TRIM = 16 -- of so many ends one strikes those that are over
local RESEND_MS = 60000 -- after which a message that did not come is sent again; doubles
local RESENDS = 4 -- times; then, for what a broker has lost, once a day
local LAST_RESENDS = 30 -- days; then the run is forgotten, its messages are the broker's
local PUSHES = 5 -- that no worker took: only the broker gets a run then, and what it was given before
local FIRST = 1 -- µs: when one came before whom nobody is to go
local AHEAD = 1000000 -- µs that others' clocks may be: nobody comes later than that

local is_in_woken = { woken = true, running = true, settling = true }

local function read_record(text)
    local is_read, found = pcall(cjson.decode, text)
    return is_read and type(found) == 'table' and found or nil
end

-- Returns what is known of a run, or nothing.
local function record(run)
    if key.runs[run] == nil then
        local text = field('r:' .. run)
        key.runs[run] = text and read_record(text) or false
    end
    return key.runs[run] or nil
end

-- Writes what is known of a run, with its envelope if that is given.
local function write_run(run, of, envelope)
    key.runs[run], key.tasks['r:' .. run] = of, nil
    local fields = { 'r:' .. run, cjson.encode(of) }
    if envelope then
        fields[3], fields[4] = 'e:' .. run, envelope
        key.tasks['e:' .. run] = envelope
    end
    redis.call('HSET', TASKS, unpack(fields))
end

-- Changes the state of a run, the only place where that is done: first it is where it is found from now
-- on, then no longer where it was. A script that is cut short leaves it in two places, never in none.
-- `at_ms` is when time does something to it.
local function go(run, of, state, at_ms, envelope)
    local was = of.s
    of.s, key.head = state, nil
    if state == 'waiting' then
        redis.call('ZADD', QUEUE, 'NX', of.p, 'p:' .. run)
    elseif at_ms then
        redis.call('ZADD', WOKEN, integer(at_ms), run)
    end
    write_run(run, of, envelope)
    if was == 'waiting' and state ~= 'waiting' then
        redis.call('ZREM', QUEUE, 'p:' .. run)
    elseif is_in_woken[was] and not is_in_woken[state] then
        redis.call('ZREM', WOKEN, run)
    end
end

-- The place of one that came at `arrival` (0: it comes now), but no later than the clock says. Where
-- those who wait came later than that, it was set back since: who comes now is behind them all the same.
local function place_of(arrival)
    local last = last_arrival()
    if arrival == 0 then
        return math.max(now, last + 1)
    elseif arrival > FIRST and last > now + AHEAD then
        return arrival > now + AHEAD and arrival or last + 1
    end
    return math.min(arrival, now + AHEAD)
end

local function last_arrival()
    return tonumber(redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2] or 0)
end

-- What is known of the end of a run: when it ended (ms), until when its result is being stored, and
-- until when its end must be known.
local function ends_of(run)
    local found = redis.call('ZMSCORE', DONE, run, '~' .. run, '+' .. run)
    return tonumber(found[1] or nil), tonumber(found[2] or nil), tonumber(found[3] or nil)
end

-- Forgets a run; true if it was known.
local function forget_run(run)
    local of = record(run)
    if redis.call('HDEL', TASKS, 'r:' .. run, 'e:' .. run) == 0 then
        return false
    end
    key.runs[run], key.tasks['r:' .. run], key.tasks['e:' .. run] = false, false, false
    if key.head and key.head[1] == 'p:' .. run then
        key.head = nil
    end
    if not of or of.y or not is_in_woken[of.s] then
        redis.call('ZREM', QUEUE, 'p:' .. run)
    end
    if not of or of.s ~= 'waiting' then
        redis.call('ZREM', WOKEN, run)
    end
    return true
end

-- Returns a count of a run; 0 for what is no count, as another program may have written there.
local function times_in(value)
    local times = tonumber(value or 0) or 0
    return times > 0 and times < EXACT and times or 0
end

local function times_sent(of)
    return times_in(of.n)
end

local function pushes(of)
    return times_in(of.d)
end

-- Whether the broker may have a message of a run: it was given one, or the run's caller gives it one.
local function is_with_broker(of)
    return pushes(of) >= PUSHES
end

-- Notes how often the broker was given a run, which it alone gets from then on.
local function note_sent(of, times)
    of.n = times > 0 and times or nil
    if times > 0 then
        of.d = PUSHES
    end
end

-- Puts a run that comes now at the end of the queue.
local function line_up(run, of, envelope)
    of.p = integer(place_of(0))
    go(run, of, 'waiting', nil, envelope)
end

local function claim_ms()
    return CLAIM_MS * 2 ^ math.min(redis.call('ZCARD', WOKEN), DOUBLINGS)
end

-- Ends.

-- Has the record of ends live for so long, or a little longer: it is asked for often.
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

-- Remembers an end.
local function record_end(run, is_plain)
    local settles, copied
    if not is_plain then -- else it was neither sent twice, nor is its result being stored
        local _
        _, settles, copied = ends_of(run)
    end
    local at_ms = math.max(now_ms, copied or 0)
    note_end(run, at_ms, math.max(DONE_MS, at_ms - now_ms))
    if settles or copied then
        redis.call('ZREM', DONE, '~' .. run, '+' .. run)
    end
end

-- Keeps a second delivery from running while the result is on its way to be stored: for as long as
-- the lease would have lasted, if the process died now.
local function note_settling(run)
    local held = held_by(run)
    local until_ms = now_ms + math.max(held and held.ends - now_ms or 0, CLAIM_MS)
    note_end('~' .. run, until_ms, DONE_MS)
    local of = record(run)
    if of and not of.b then
        go(run, of, 'settling', until_ms)
    end
end

-- Notes that the broker may have another message of a run, which may come after the run's end.
local function expect_copy(run, of)
    redis.pcall('ZADD', DONE, integer(now_ms + COPIES_MS), '+' .. run)
    keep_ends(COPIES_MS)
    if of and not of.x then
        of.x = true
        write_run(run, of)
    end
end

-- Notes that a run has come to its key, for a grant; with `keep` its message stays here until the run
-- has ended.
local function arrive(run, grant, keep, lease_ms)
    local of = record(run)
    if of and of.x then
        expect_again(grant)
    end
    if keep and of and not of.b then
        of.c, of.n = true, nil
        go(run, of, 'running', of.s ~= 'woken' and now_ms + lease_ms or nil) -- else a sweep looks sooner
    elseif of then
        forget_run(run)
    end
end

-- Lets a second delivery, which may not run beside the first one, keep nobody else from entering.
local function put_off(run, of, for_ms, envelope)
    go(run, of, 'running', now_ms + for_ms, envelope)
end
