-- send.lua: accept a run at the time of its call: reserve the key for it, queue it, or defer it.
-- Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV run envelope task sent_to [request]
-- returns go | queued | later | updated | changed: nothing was done, another run has the identity than
--         the caller expected | a `reply` (answers.lua) with one of these as its status, or with full:
--         nothing was done, `most` wait; with the holder of a grant, if there is one, and its ttl_ms
--
-- go        the key is reserved. The caller publishes the message, or a sweep does if the caller dies.
--           It goes through the broker only, so that it does not overtake earlier calls
-- sent_to   the destination of its message
-- request   JSON; fields that are missing are false:
-- want      see acquire.lua
-- delay_ms  how long it is deferred before it joins the queue
-- repeated  an earlier copy of this request got no answer
-- identity  the identity that the run takes
-- until_when  how long it keeps it: as in calls.lua, except that a number is in ms from now
-- replaces  the run that is known to have the identity, and may lose it. The same run: its message is
--           replaced, if it waits. *: the present holder of the identity keeps it, this run gets none
-- most_ms   the longest time from the first call until the run joins the queue, over all updates
-- paced     it joins the queue only when its own rates, or an operator's, allow a start
-- expires_ms  when it loses its identity if it has not begun
-- marks     see calls.lua
-- beside    it is sent in addition to the run that it replaces, even if that run waits
-- recalls   free | all: the run that had the identity before is asked to leave; free: not if its marks say
--           that its message must not be replaced
-- most      see acquire.lua; a deferred run is not refused
--
-- later  zset  deferred runs, by the time when they join the queue (ms; the fraction keeps their order);
--              also runs that arrived earlier through the broker, until that time
-- USES records grants limits rates gates runs answers queue calls
-- OFTEN look load known_number read_grant fetch answer_again answered record field held_by grant_for grant_of
-- OFTEN place_of new_place ahead_in enqueue let_in hand_on answer

local ORDER_MS = 1 / 2048 -- between runs of the same ms; scores are that precise until 2109

local run, envelope, task, sent_to, request = unpack(ARGV)
request = request and cjson.decode(request) or {}
local want, identity, replaces = want_in(request.want), request.identity or '', request.replaces
local repeated, paced, most_ms = request.repeated, request.paced, request.most_ms
local takes = identity ~= ''

local function take_identity(first_ms)
    local first = most_ms and integer(first_ms or now_ms) or ''
    note_call(identity, run, request.until_when, first, request.expires_ms, request.marks or '')
end

-- Forgets an earlier end, as a task that is sent again by its id must run again; and an earlier time, as
-- its first message may have arrived before that.
local function forget_ended()
    redis.call('ZREM', DONE, run, '~' .. run, '!' .. run)
    redis.call('ZREM', LATER, run)
end

-- Returns the run's new record, with the state and place of the old one.
local function new_record(before)
    local of = { s = before.s, p = before.p, h = before.h, n = before.n, d = before.d, c = before.c, u = before.u }
    of.w = want.text ~= '' and want.text or nil
    of.t, of.q, of.i = task ~= '' and task or nil, sent_to, takes and identity or before.i
    return of
end

-- Asks the run to leave that has the identity, or had it until it began.
local function recall_earlier()
    local head, before = string.match(redis.call('HGET', CALLS, identity) or '', '^(%S+) (.*)$')
    local is_fixed = head and string.find(head, '=', 1, true)
    if before and task_of(before) ~= task_of(run) and (request.recalls == 'all' or not is_fixed) then
        recall(inside(before, true) or before)
    end
end

-- Reserves a key that has neither a holder nor a waiter. Returns the script's answer; nothing if the identity
-- is taken for a time that has not passed. No run has it otherwise: the key has none.
local function answer_free_key()
    read_clock()
    local entry = takes and redis.call('HGET', CALLS, identity)
    if tonumber(string.match(entry or '', '^%d+') or 0) > now_ms then
        return nil
    end
    local token, refused = write_alone(reserved_owner(run), run, CLAIM_MS, RESERVED, clock)
    if not token then
        return refused
    end
    local of = new_record({})
    of.s, of.p, of.d = 'woken', clock, PUSHES
    redis.call('ZADD', WOKEN, integer(now_ms + UNSENT_MS), run) -- as go() does it
    write_run(run, of, envelope)
    forget_ended()
    if takes then
        take_identity()
    end
    return 'go'
end

-- Returns the answer that a run got before; nothing if it is not known.
local function answered(of)
    if (repeated and ends_of(run)) or held_by(run) then
        return 'queued'
    elseif not of then
        return nil
    end
    local is_sent = redis.call('ZSCORE', WOKEN, run)
    local later = of.s == 'later' and redis.call('ZSCORE', LATER, run)
    local waits = is_sent or later or redis.call('ZSCORE', QUEUE, 'p:' .. run)
    -- Without a place, the script that accepted it was interrupted.
    return is_sent and grant_for(run) and 'go' or later and 'later' or waits and 'queued' or nil
end

-- Serves the waiters, of which the run is one now. Returns the script's answer.
local function let_in(status)
    hand_on()
    local has_woken = woken[1] ~= nil
    for i = #woken, 1, -1 do
        if woken[i].run == run and not woken[i].route then
            status = 'go' -- the caller publishes the message
            table.remove(woken, i)
            table.remove(envelopes, i)
            local of = record(run)
            of.d = PUSHES
            write_run(run, of)
        end
    end
    if not (has_woken or key.opens_ms) then
        local is_next = false
        if not key.tasks.turn then
            is_next = redis.call('ZRANK', QUEUE, 'p:' .. run) == 0
        elseif not key.alone or key.alone.stage == RESTING then
            is_next = first_in_turn() == 'p:' .. run
        end
        if is_next then
            look_ahead('p:' .. run)
        end
    end
    return answer(status)
end

-- Returns when (ms) the run joins the queue; 0: now.
local function joins_at()
    local wait = (request.delay_ms or 0) * 1000
    if paced then
        -- An operator may have raised the rates.
        local opens_in = math.min(starts_by(want.terms), starts_by(terms_for(want)))
        local _, rates = rates_of(want.terms or '')
        local longest = 0
        for _, rate in ipairs(rates) do
            longest = math.max(longest, counts_for(rate.per))
        end
        -- Unknown while a start is reserved: then it joins the queue, ahead of the next call.
        wait = math.max(wait, math.min(opens_in, longest))
    end
    return wait > 0 and math.ceil((now + wait) / 1000) or 0
end

-- Schedules when the run joins the queue, behind earlier calls of the same ms. A run that was scheduled
-- for the same ms keeps its place.
local function join_later(due_ms, before_ms)
    if before_ms and math.floor(before_ms) == due_ms then
        return
    end
    local at_ms
    repeat
        local from, to = '(' .. integer(due_ms + 1), integer(due_ms)
        local last = redis.call('ZRANGE', LATER, from, to, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2]
        at_ms = last and last + ORDER_MS or due_ms
        due_ms = due_ms + 1
    until at_ms < due_ms
    redis.call('ZADD', LATER, string.format('%.11f', at_ms), run)
end

-- Whether deferred runs are due that have not joined the queue yet.
local function some_have_come()
    local first_ms = redis.call('ZRANGE', LATER, 0, 0, 'WITHSCORES')[2]
    return first_ms and tonumber(first_ms) <= now_ms
end

-- Replaces the message of the run, which waits and keeps its place. A deferred run becomes due now if
-- the new call has no delay.
local function update()
    local first_ms = tonumber(string.match(redis.call('HGET', CALLS, identity), '^[^@ ]+@(%d+)'))
    local of = new_record(record(run) or {})
    write_run(run, of, envelope) -- before all other writes: a full server may refuse it
    if want.lane then
        uncap(want.lane) -- it may request fewer units
    end
    take_identity(first_ms)
    local before_ms = tonumber(redis.call('ZSCORE', LATER, run))
    if not before_ms then
        return let_in('updated')
    end
    local due_ms = joins_at() -- its rates may have changed
    if most_ms and first_ms then
        due_ms = math.min(due_ms, math.ceil(first_ms + most_ms))
    end
    if due_ms > now_ms then
        join_later(due_ms, before_ms)
        if paced and due_ms < before_ms - 1 then
            note_look(due_ms - now_ms)
        end
        return answer('updated')
    end
    line_up(run, of)
    redis.call('ZREM', LATER, run) -- last: a script may be interrupted
    return let_in('updated')
end

-- Answers a call if another run has its identity, or if the run that it replaces has changed.
local function answer_identity()
    local other, where = taken_by(redis.call('HGET', CALLS, identity))
    local is_same = other and task_of(other) == task_of(run)
    if replaces == run and other == run and where == 'waiting' then
        return update()
    elseif replaces == run and (not repeated or redis.call('HGET', TASKS, 'e:' .. run) ~= envelope) then
        return 'changed' -- else an earlier copy of the request did it, and its answer was lost
    elseif other and not is_same and replaces == '*' then
        takes = false
    elseif other and not is_same and (other ~= replaces or (where == 'waiting' and not request.beside)) then
        return 'changed'
    end
end

local function answer_again()
    local before = answered(record(run))
    local due_ms = before == 'later' and tonumber(redis.call('ZSCORE', LATER, run))
    if due_ms then
        note_look(math.max(1, due_ms - now_ms))
    end
    return before and answer(before)
end

-- Returns when (ms) a new run joins the queue, behind deferred ones that are due; 0: now.
local function joins_behind()
    local due_ms = joins_at()
    return due_ms == 0 and paced and some_have_come() and math.ceil(now_ms) or due_ms
end

-- The most frequent case. It needs few of the functions.
local is_plain = want.text == '' and not (request.delay_ms or repeated) and replaces ~= run
local result = is_plain and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0 and answer_free_key()
if result then
    return result
end
look('', run)
fetch('limit', 'turn', 'r:' .. run)
result = takes and answer_identity() or answer_again()
if result then
    return result
end
if request.most and not request.delay_ms and is_full(run, request.most) then
    return reply(with_holder('full', a_holder()))
end
local of, due_ms = new_record(record(run) or {}), (request.delay_ms or paced) and joins_behind() or 0
if due_ms > 0 then
    of.s, of.u = 'later', paced or nil
else
    of.s, of.p = 'waiting', integer(new_place(of.w))
end
write_run(run, of, envelope) -- before all other writes: a full server may refuse it
forget_ended()
local reserved = grant_for(run)
if reserved then
    vacate(reserved) -- its want may have changed
end
if takes and request.recalls then
    recall_earlier() -- before it takes the identity: a script may be interrupted
end
if takes then
    take_identity()
end
if due_ms > 0 then
    join_later(due_ms)
    note_look(math.max(1, due_ms - now_ms))
    return answer('later')
end
enqueue('p:' .. run, of.p, of.w)
return let_in('queued')
