-- send.lua: take in a run as it is sent: the key is kept for it, or it waits in the queue, or for its
-- time. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV run envelope task sent_to [request]
-- returns go | queued | later | updated | changed: nothing was done, for another run has the identity
--         than was thought | as queue.lua's `reply`, with one of these as its status: the other runs
--         that are admitted, and in how many ms a run joins the queue
--
-- go        it is on its way: its caller publishes the message, or a sweep does if that process dies.
--           It comes by the broker alone, so that it passes no earlier work
-- sent_to   the destination of its message
-- request   JSON; what is not in it is false:
-- want      as in acquire.lua
-- delay_ms  how long it waits before it joins the queue
-- repeated  it was sent before, and not answered
-- identity  which the run is to have
-- until_when  for how long: as in calls.lua, but for a number of ms from now
-- replaces  the run that is known to have it, and may lose it; the same run: its message is replaced,
--           if it waits; *: whoever has it keeps it, and this run goes without
-- most_ms   the longest time from the first call until it joins the queue, however often it is
--           updated
-- paced     it does not join the queue before its own rates, or an operator's, let it start
-- expires_ms  when it loses its identity if it has not begun
-- marks     as in calls.lua
-- beside    it is sent in addition to the run that it replaces, even if that one waits
--
-- later  zset  runs that do not join the queue before their time (ms, with a fraction for their order
--              then); and some that have come by themselves meanwhile, until that time
-- USES grant calls units queue

local run, envelope, task, sent_to, request = unpack(ARGV)
request = request and cjson.decode(request) or {}
local want, identity, replaces = request.want or '', request.identity or '', request.replaces
local repeated, paced, most_ms = request.repeated, request.paced, request.most_ms
local fields = { 'e:' .. run, envelope, 't:' .. run, task, 'q:' .. run, sent_to }

local ORDER_MS = 1 / 2048 -- so far apart are those of one ms; a score has no smaller steps until 2109

if identity ~= '' then
    fields[7], fields[8] = 'i:' .. run, identity
end
local function take_identity(now_ms, first_ms)
    local first = most_ms and integer(first_ms or now_ms) or ''
    note_call(identity, run, now_ms, request.until_when, first, request.expires_ms, request.marks or '')
end

-- Who sends a task again by its id means it; and it may have come before its time when it was sent
-- before.
local function forget_ended()
    redis.call('ZREM', DONE, run)
    redis.call('ZREM', LATER, run)
end

local is_plain = want == '' and not (request.delay_ms or repeated) and replaces ~= run
local holder, holder_run = unpack(is_plain and redis.call('HMGET', LOCK, 'owner', 'run') or {})
local is_alone = holder and holder ~= 'several:' and string.find(holder, 'parked:resting:', 1, true) ~= 1
if is_alone and identity == '' and holder_run ~= run and redis.call('HEXISTS', TASKS, fields[1]) == 0 then
    -- One has all of it: there is nothing but to wait.
    redis.call('HSET', TASKS, unpack(fields)) -- before all other writes: a full server may refuse it
    forget_ended()
    line_up(microseconds(), run)
    return 'queued'
end
local now = microseconds()
local is_free = is_plain and not holder and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0
if is_free and not (identity ~= '' and taken_by(redis.call('HGET', CALLS, identity), now / 1000)) then
    -- Nobody has it, nobody waits: most calls end here.
    local token, refused = grant(now, 'parked:' .. run, run, CLAIM_MS)
    if not token then
        return refused
    end
    redis.call('HSET', LOCK, 'due', integer(now))
    redis.call('HSET', TASKS, 's:' .. run, integer(now), 'd:' .. run, PUSHES, unpack(fields))
    redis.call('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), run)
    forget_ended()
    if identity ~= '' then
        take_identity(now / 1000)
    end
    return 'go'
end

-- What was answered of a run that is there; nothing: it is not.
local function answered()
    if (repeated and redis.call('ZSCORE', DONE, run)) or holds(run, now) then
        return 'queued'
    elseif redis.call('HEXISTS', TASKS, fields[1]) == 1 then
        local is_sent = redis.call('ZSCORE', WOKEN, run)
        local later = is_put_off(run) and redis.call('ZSCORE', LATER, run)
        local stands = is_sent or later or redis.call('ZSCORE', QUEUE, 'p:' .. run)
        local goes = is_sent and keeps_for(run)
        -- One that has no place was taken in by half: the script was broken off.
        return goes and 'go' or later and 'later' or stands and 'queued' or nil
    end
    return nil
end

-- Gives what is free to those who wait, of whom the run is one now; returns the script's answer.
local function let_in(status)
    hand_on(now, '', 0)
    if not (woken[1] or opens_ms) and redis.call('ZRANK', QUEUE, 'p:' .. run) == 0 then
        look_ahead(now)
    end
    for place, each in ipairs(woken) do
        if each.run == run then
            status = 'go' -- the caller has its message and publishes it
            redis.call('HSET', TASKS, 'd:' .. run, PUSHES)
            table.remove(woken, place)
            table.remove(envelopes, place)
            break
        end
    end
    return answer(status)
end

-- When (ms) the run joins the queue; 0: at once.
local function joins_at(now)
    local wait = (request.delay_ms or 0) * 1000
    if paced then
        local _, _, terms = want_in(want)
        local opens = math.min(starts_by(terms, now), starts_in(terms, now)) -- an operator lets go on sooner
        local _, rates = rates_of(terms or '')
        local longest = 0
        for _, rate in ipairs(rates) do
            longest = math.max(longest, counts_for(rate.per))
        end
        -- While one has to come, it is not known when it opens: it stands before the next.
        wait = math.max(wait, math.min(opens, longest))
    end
    return wait > 0 and math.ceil((now + wait) / 1000) or 0
end

-- Has the run join the queue in a ms, after those that were called before and join it then, too; one that
-- was to join it then already keeps its place.
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

-- Whether there are some whose time has come, and who have not joined the queue yet.
local function some_have_come(now)
    local first_ms = redis.call('ZRANGE', LATER, 0, 0, 'WITHSCORES')[2]
    return first_ms and tonumber(first_ms) <= now / 1000
end

-- Replaces the message of the run, which waits and keeps its place. One that is not due is so now, if
-- the call is not to be delayed.
local function update()
    local now_ms = now / 1000
    local first_ms = tonumber(string.match(redis.call('HGET', CALLS, identity), '^[^@ ]+@(%d+)'))
    redis.call('HSET', TASKS, unpack(fields)) -- before all other writes: a full server may refuse it
    note_want('p:' .. run, want)
    take_identity(now_ms, first_ms)
    local before_ms = tonumber(redis.call('ZSCORE', LATER, run))
    if not before_ms then
        return let_in('updated')
    end
    local due_ms = joins_at(now) -- by its rates of now, which may be others
    if most_ms and first_ms then
        due_ms = math.min(due_ms, math.ceil(first_ms + most_ms))
    end
    if due_ms > now_ms then
        join_later(due_ms, before_ms)
        if paced and due_ms < before_ms - 1 then
            look_in(math.ceil(due_ms - now_ms))
        end
        return answer('updated')
    end
    line_up(now, run)
    redis.call('ZREM', LATER, run) -- only then: a script may be broken off
    return let_in('updated')
end

prune(now)
local takes = identity ~= ''
if takes then
    local other, where = taken_by(redis.call('HGET', CALLS, identity), now / 1000)
    local is_same = other and task_of(other) == task_of(run)
    if replaces == run and other == run and where == 'waiting' then
        return update()
    elseif replaces == run and (not repeated or redis.call('HGET', TASKS, fields[1]) ~= envelope) then
        return 'changed' -- else that was done, and let it go, and was not answered
    elseif other and not is_same and replaces == '*' then
        takes = false
    elseif other and not is_same and (other ~= replaces or (where == 'waiting' and not request.beside)) then
        return 'changed'
    end
end
local before = answered()
if before then
    local due_ms = before == 'later' and tonumber(redis.call('ZSCORE', LATER, run))
    if due_ms then
        look_in(math.max(1, math.ceil(due_ms - now / 1000)))
    end
    return answer(before)
end
redis.call('HSET', TASKS, unpack(fields)) -- before all other writes: a full server may refuse it
note_want('p:' .. run, want)
forget_ended()
if keeps_for(run) then
    vacate('parked:' .. run, now) -- it was for another want, perhaps
end
if takes then
    take_identity(now / 1000)
end
local due_ms = joins_at(now)
if due_ms == 0 and paced and some_have_come(now) then
    due_ms = math.ceil(now / 1000)
end
if due_ms > 0 then
    join_later(due_ms)
    look_in(math.max(1, math.ceil(due_ms - now / 1000)))
    return answer('later')
end
line_up(now, run)
return let_in('queued')
