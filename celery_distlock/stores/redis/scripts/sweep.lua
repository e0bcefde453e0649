-- sweep.lua: find what a crash left behind at one key: a free key with waiters, a run whose waker
-- died before it was sent, a message that never came, a run that ended with its process.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV limit [backlogs]
-- returns as queue.lua's `reply`, with waiting: 1 if a run waits or is in flight, else 0. Each run that
--         is sent again has `returned`: it has tried to claim the key before, and `published`: its
--         message was given to the broker
--
-- backlogs  destinations, a line each, where the broker's queue has messages: what it was given for
--           these is not sent again
-- USES grant handing calls units queue

local now = microseconds()
local is_free = redis.call('EXISTS', LOCK, LATER, CALLS) == 0
if is_free and not redis.call('ZRANGEBYSCORE', WOKEN, '-inf', integer(now / 1000), 'LIMIT', 0, 1)[1] then
    -- A rest has ended: the usual case of what the ticker looks at.
    local given = hand_to_first(false, '')
    if given then
        local waits = redis.call('EXISTS', QUEUE, WOKEN) > 0 and 1 or 0
        return reply({ waiting = waits })
    end
end

local MOST_CALLS = 500 -- identities that are looked at, of a key
local MOST_LOOKS = 4 -- at so many more, while most of them mean nothing any more
local limit, backlogs = unpack(ARGV)

local function is_in_a_backlog(run)
    local sent_to = backlogs and redis.call('HGET', TASKS, 'q:' .. run)
    return sent_to and string.find('\n' .. backlogs .. '\n', '\n' .. sent_to .. '\n', 1, true)
end

redis.call('ZREM', QUEUE, '') -- nobody of ours; and a full server refuses a script's first write
local due = redis.call('ZRANGEBYSCORE', WOKEN, '-inf', integer(now / 1000), 'LIMIT', 0, limit)
prune(now)
for _, run in ipairs(due) do
    local envelope = redis.call('HGET', TASKS, 'e:' .. run)
    local runs, left_ms = holds(run, now)
    local times = times_sent(run)
    if envelope and runs then
        -- One that came back is sent as soon as its process, which is being ended, is gone.
        if redis.call('ZSCORE', WOKEN, run) ~= '0' then
            redis.pcall('ZADD', WOKEN, integer(now / 1000 + left_ms), run)
        end
    elseif envelope and not is_with_broker(run) and redis.call('ZSCORE', QUEUE, 'p:' .. run) then
        redis.call('ZREM', WOKEN, run) -- it stepped back, and its turn comes again
    elseif envelope and times >= RESENDS + LAST_RESENDS and not keeps_for(run) then
        unpark(run)
    elseif envelope and times > 0 and is_in_a_backlog(run) then
        redis.pcall('ZADD', WOKEN, integer(now / 1000 + RESEND_MS), run)
    elseif envelope then
        redis.pcall('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), run)
        if times == 0 then
            expect_copy(run) -- a process may have sent it, and died before it was noted
        end
        note_woken(run, envelope, { returned = has_come(run), published = times > 0 })
    else
        unpark(run)
        redis.call('ZREM', WOKEN, run)
    end
end
local comes = redis.call('ZRANGEBYSCORE', LATER, '-inf', integer(now / 1000), 'LIMIT', 0, limit)
for _, run in ipairs(comes) do
    local is_there = redis.call('ZSCORE', WOKEN, run) or redis.call('ZSCORE', QUEUE, 'p:' .. run)
    if is_put_off(run) and not is_there then
        line_up(now, run) -- its time has come
    end
    redis.call('ZREM', LATER, run) -- only then: a script may be broken off
end
local sent_again = #woken
hand_on(now, '', 0)
if #woken == sent_again and not opens_ms then
    look_ahead(now) -- behind one who has all of it, and rests
end
local next_ms = tonumber(redis.call('ZRANGE', LATER, 0, 0, 'WITHSCORES')[2] or math.huge)
if next_ms < math.huge then
    look_in(math.max(1, math.ceil(next_ms - now / 1000)))
end

-- Strikes identities that mean nothing any more; of many, some. It begins anywhere: else those that are
-- behind as many as are looked at, which are taken, would stay for ever.
local function strike_calls()
    local many, looked, struck = redis.call('HLEN', CALLS), 0, 0
    local cursor, calls = many > MOST_CALLS and integer(now % 2 ^ 32) or '0', nil
    for _ = 1, MOST_LOOKS do
        cursor, calls = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', MOST_CALLS))
        for i = 1, #calls, 2 do
            if not taken_by(calls[i + 1], now / 1000) then
                struck = struck + redis.call('HDEL', CALLS, calls[i])
            end
        end
        looked = looked + #calls / 2
        if looked >= many or (looked >= MOST_CALLS and 2 * struck < looked) then
            return
        end
    end
end

strike_calls()
local allowed = limit_at(now) -- which strikes one that has ended
local is_limited = allowed.capacity or allowed.rates
local waits = redis.call('EXISTS', QUEUE, WOKEN, LATER, CALLS) > 0 or is_limited
return reply({ waiting = waits and 1 or 0 })
