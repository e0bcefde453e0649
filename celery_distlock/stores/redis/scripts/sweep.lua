-- sweep.lua: find what a crash left behind at one key: a free key with waiters, a run whose waker
-- died before it was sent, a message that never came, a run that ended with its process.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV limit_of [backlogs]
-- returns as queue.lua's `reply`, with waiting: 1 if a run waits or is in flight, else 0. Each run that
--         is sent again has `returned`: it has tried to claim the key before, and `published`: its
--         message was given to the broker
--
-- backlogs  destinations, a line each, where the broker's queue has messages: what it was given for
--           these is not sent again
-- USES records grants limits rates gates runs answers queue calls

local OVER_MS = 12000 -- before the end of what is kept, it is kept again
local MOST_CALLS = 500 -- identities that are looked at, of a key
local MOST_CALL_LOOKS = 4 -- at so many more, while most of them mean nothing any more
local limit_of, backlogs = unpack(ARGV)

local function is_in_a_backlog(of)
    return backlogs and of.q and string.find('\n' .. backlogs .. '\n', '\n' .. of.q .. '\n', 1, true)
end

-- Sends a run again, which has not come.
local function resend(run, of)
    local times = times_sent(of)
    if of.s == 'woken' then
        redis.call('ZADD', WOKEN, integer(now_ms + UNSENT_MS), run)
    else
        go(run, of, 'woken', now_ms + UNSENT_MS)
    end
    if times == 0 then
        expect_copy(run, of) -- a process may have sent it, and died before it was noted
    end
    note_woken(run, field('e:' .. run), { returned = of.c == true, published = times > 0 })
end

-- Does what is due to a run that is with a worker or the broker.
local function look_at(run)
    fetch('r:' .. run, 'e:' .. run)
    local of, held = record(run), held_by(run)
    if not of or not field('e:' .. run) then
        redis.call('ZREM', WOKEN, run)
    elseif held then
        -- One that came back is sent as soon as its process, which is being ended, is gone.
        if redis.call('ZSCORE', WOKEN, run) ~= '0' then
            redis.call('ZADD', WOKEN, integer(held.ends), run)
        end
    elseif of.s == 'waiting' or (not is_with_broker(of) and redis.call('ZSCORE', QUEUE, 'p:' .. run)) then
        of.s = 'woken' -- it stepped back, and its turn comes again; or a script was cut short
        go(run, of, 'waiting')
    elseif times_sent(of) >= RESENDS + LAST_RESENDS and not grant_for(run) then
        forget_run(run)
    elseif times_sent(of) > 0 and is_in_a_backlog(of) then
        redis.call('ZADD', WOKEN, integer(now_ms + RESEND_MS), run)
    else
        resend(run, of)
    end
end

-- Has a run try its keys again for which this one is kept, before that is over.
local function look_at_kept()
    local kept = key.alone or (key.kept and grant_for(key.kept))
    if not kept or kept.stage ~= KEPT or kept.ends - now_ms > OVER_MS then
        return
    end
    local of = record(kept.run)
    if of and of.k then
        note_woken(kept.run, '', { route = of.k, givers = '' })
    end
end

-- Has those join the queue whose time has come.
local function line_up_due()
    for _, run in ipairs(redis.call('ZRANGEBYSCORE', LATER, '-inf', integer(now_ms), 'LIMIT', 0, limit_of)) do
        local of = record(run)
        if of and of.s == 'later' then
            line_up(run, of)
        end
        redis.call('ZREM', LATER, run) -- only then: a script may be cut short
    end
end

-- Removes identities that mean nothing any more; of many, some. It begins anywhere: else those that are
-- behind as many as are looked at, which are taken, would stay for ever.
local function strike_calls()
    local many, looked, struck = redis.call('HLEN', CALLS), 0, 0
    local cursor, calls = many > MOST_CALLS and integer(now % 2 ^ 32) or '0', nil
    for _ = 1, many > 0 and MOST_CALL_LOOKS or 0 do
        cursor, calls = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', MOST_CALLS))
        for i = 1, #calls, 2 do
            if not taken_by(calls[i + 1]) then
                struck = struck + redis.call('HDEL', CALLS, calls[i])
            end
        end
        looked = looked + #calls / 2
        if looked >= many or (looked >= MOST_CALLS and 2 * struck < looked) then
            return
        end
    end
end

-- NEVER REFUSED
look('', '')
for _, run in ipairs(redis.call('ZRANGEBYSCORE', WOKEN, '-inf', integer(now_ms), 'LIMIT', 0, limit_of)) do
    look_at(run)
end
line_up_due()
look_at_kept()
free()
if key.alone then
    look_ahead() -- behind one that has all of it, and rests
end
local next_ms = redis.call('ZRANGE', LATER, 0, 0, 'WITHSCORES')[2]
if next_ms then
    note_look(math.max(1, math.ceil(next_ms - now_ms)))
end
strike_calls()
local is_limited = limit_now().capacity or limit_now().rates
local waits = is_limited or redis.call('EXISTS', QUEUE, WOKEN, LATER, CALLS) > 0
return reply({ waiting = waits and 1 or 0 })
