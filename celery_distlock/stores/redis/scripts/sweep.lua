-- sweep.lua: recover what a crash left at one key: a free key with waiters, a woken run that was never
-- sent, a message that was lost, a run whose process died. Sends the runs that have waited for too long.
-- KEYS lock queue tasks woken fence done rate lanes later calls leaving
-- ARGV limit_of [backlogs]
-- returns a `reply` (answers.lua) with waiting: 1 if a run waits or is in flight, else 0. Each run that
--         is sent again has `returned`: it has tried to claim the key before, and `published`: its
--         message was given to the broker
--
-- limit_of  the most runs that are handled
-- backlogs  destinations, one a line, whose broker queue has messages: runs that were sent there are not
--           sent again
-- USES records grants limits rates gates runs answers queue calls
-- OFTEN look read_clock load read_grant known_number fetch_with_first mend_lanes last_turn look_at_kept free
-- OFTEN hand_on first_waiter offer_to_run run_of record field held_by want_in opens keeps_out held_alone paused
-- OFTEN limit_now read_limits resting taken full too_soon terms_for wake reserve reserved_owner claim_ms grant_to
-- OFTEN grant_alone write_alone mint begin_lease integer go dequeue is_in_woken write_run send push
-- OFTEN follows_another publish tidy free_forgotten look_at_rest reply named

local OVER_MS = 12000 -- before its end, a kept grant is extended
local MOST_CALLS = 500 -- identities checked in one step
local MOST_CALL_LOOKS = 4 -- steps, while most identities are obsolete
local limit_of, backlogs = unpack(ARGV)
local LEAVING = KEYS[11]

local function is_in_a_backlog(of)
    return backlogs and of.q and string.find('\n' .. backlogs .. '\n', '\n' .. of.q .. '\n', 1, true)
end

-- Sends a run again that has not claimed its key.
local function resend(run, of)
    local times = times_in(of.n)
    if of.s == 'woken' then
        redis.call('ZADD', WOKEN, integer(now_ms + UNSENT_MS), run)
    else
        go(run, of, 'woken', now_ms + UNSENT_MS)
    end
    if times == 0 then
        expect_copy(run, of) -- a process may have sent it, and died before it noted that
    end
    note_woken(run, field('e:' .. run), { returned = of.c == true, published = times > 0 })
end

-- Handles a run that is due in `woken`.
local function look_at(run)
    fetch('r:' .. run, 'e:' .. run)
    local of, held = record(run), held_by(run)
    local reserved = of and want_in(of.w).is_strict and grant_for(run)
    if reserved then
        lengthen(reserved, STRICT_MS)
    end
    if not of or not field('e:' .. run) then
        redis.call('ZREM', WOKEN, run)
    elseif held then
        -- A run whose message was returned is sent when its process, which is ending, is gone.
        if redis.call('ZSCORE', WOKEN, run) ~= '0' then
            redis.call('ZADD', WOKEN, integer(held.ends), run)
        end
    elseif of.s == 'waiting' or (not is_with_broker(of) and redis.call('ZSCORE', QUEUE, 'p:' .. run)) then
        of.s = 'woken' -- it was queued again; or a script was interrupted
        go(run, of, 'waiting')
    elseif times_in(of.n) >= RESENDS + LAST_RESENDS and not grant_for(run) then
        forget_run(run)
    elseif times_in(of.n) > 0 and is_in_a_backlog(of) then
        redis.call('ZADD', WOKEN, integer(now_ms + RESEND_MS), run)
    else
        resend(run, of)
    end
end

-- Has a run for which this key is kept try its keys again, before the grant ends.
local function look_at_kept()
    local kept = key.alone or (key.kept and grant_for(key.kept))
    if not kept or kept.stage ~= KEPT or kept.ends - now_ms > OVER_MS then
        return
    end
    local of = record(kept.run)
    if of and of.k then
        note_route(kept.run, of)
    end
end

-- Frees a key that is reserved for long, for a run that is not in flight: a script was interrupted.
local function free_forgotten()
    local grant = key.alone
    local is_long = grant and grant.stage == RESERVED and grant.ends > now_ms + DAY_MS
    if is_long and not redis.call('ZSCORE', WOKEN, grant.run) then
        vacate(grant)
    end
end

-- Notes when an exclusive rest ends.
local function look_at_rest()
    if key.alone and key.alone.stage == RESTING then
        look_ahead()
    end
end

-- Queues a deferred run that is due.
local function line_up_due(run)
    local of = record(run)
    if of and of.s == 'later' then
        line_up(run, of)
    end
    redis.call('ZREM', LATER, run) -- last: a script may be interrupted
end

-- Sends a run whose time to wait is over, if it waits. Nothing is reserved for it: its policy applies, or
-- it waits again, where it arrives. Returns when (ms) it joins the queue, if it is deferred.
local function send_away(run)
    fetch('r:' .. run, 'e:' .. run)
    local of, envelope = record(run), field('e:' .. run)
    local waits = of and (of.s == 'waiting' or of.s == 'elsewhere')
    if waits and envelope then
        of.at = nil
        go(run, of, 'woken', now_ms + UNSENT_MS)
        send(run, of, envelope)
    elseif of and of.s == 'woken' and want_in(of.w).is_strict and grant_for(run) then
        vacate(grant_for(run)) -- the next one need not wait until it comes
    end
    return of and of.s == 'later' and redis.call('ZSCORE', LATER, run)
end

local function send_away_due(run)
    local joins_ms = send_away(run)
    if joins_ms then
        redis.call('ZADD', LEAVING, integer(joins_ms + 1), run)
    else
        redis.call('ZREM', LEAVING, run) -- last: a script may be interrupted
    end
end

local function first_time(runs)
    return tonumber(redis.call('ZRANGE', runs, 0, 0, 'WITHSCORES')[2] or NEVER)
end

-- Handles the runs that are due, and notes when the key must be checked for the next one.
local function handle_due(runs, handle)
    local first_ms = first_time(runs)
    if first_ms <= now_ms then
        for _, run in ipairs(redis.call('ZRANGEBYSCORE', runs, '-inf', integer(now_ms), 'LIMIT', 0, limit_of)) do
            handle(run)
        end
        first_ms = first_time(runs)
    end
    if first_ms < NEVER then
        note_look(math.max(1, math.ceil(first_ms - now_ms)))
    end
end

local function look_at_times()
    for _, run in ipairs(redis.call('ZRANGEBYSCORE', WOKEN, '-inf', integer(now_ms), 'LIMIT', 0, limit_of)) do
        look_at(run)
    end
    handle_due(LATER, line_up_due)
    handle_due(LEAVING, send_away_due)
end

-- Removes obsolete identities; of many, some. It starts at a random place, so that obsolete ones behind
-- many others are found, too.
local function remove_obsolete_calls()
    local many, looked, removed = redis.call('HLEN', CALLS), 0, 0
    local cursor, calls = many > MOST_CALLS and integer(now % 2 ^ 32) or '0', nil
    for _ = 1, many > 0 and MOST_CALL_LOOKS or 0 do
        cursor, calls = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', MOST_CALLS))
        for i = 1, #calls, 2 do
            if not (taken_by(calls[i + 1]) or may_recall(calls[i + 1])) then
                removed = removed + redis.call('HDEL', CALLS, calls[i])
            end
        end
        looked = looked + #calls / 2
        if looked >= many or (looked >= MOST_CALLS and 2 * removed < looked) then
            return
        end
    end
end

-- NEVER REFUSED
look('', '')
fetch_with_first('')
local has_more = redis.call('EXISTS', WOKEN, LATER, LEAVING, CALLS) > 0 -- than waiters
if has_more then
    look_at_times()
end
mend_lanes()
if key.tasks.turn then
    note_lanes(first_lane_end())
end
look_at_kept()
free_forgotten()
free()
look_at_rest()
if has_more then
    remove_obsolete_calls()
end
limit_now() -- it removes those that have ended
local waits = field('limit') or redis.call('EXISTS', QUEUE, WOKEN, LATER, CALLS, LEAVING) > 0
return reply({ waiting = waits and 1 or 0 })
