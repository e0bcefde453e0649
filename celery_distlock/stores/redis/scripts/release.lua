-- release.lua: release a grant, or leave the queue, and serve the next waiters.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner run ended [channel destination request]
-- returns 1 released | 0 the owner had no grant | a `reply` (answers.lua) with one of these as its status
--
-- ended     0: the run has not ended (its process is killed, its message goes back to the broker).
--           1: it has ended; a parked second delivery is dropped.
--           2: it has ended; a later second delivery must be recognised.
--           3: its body has ended, its result is not stored yet: a second delivery has to wait.
-- channel   the calling worker's delivery channel: waiters that were sent to `destination` are pushed
--           there
-- request   JSON; fields that are missing are false:
-- inbox     where a blocked waiter that gives up was waiting
-- keep_ms   how long the key stays reserved for keep_run; if that run is parked, it is served now
-- unstarted the task has not begun: its start does not count where the key has a rate
-- USES records grants limits rates gates runs answers queue
-- OFTEN look load known_number fetch_with_first fetch field run_of record read_grant grant_of reserved_owner
-- OFTEN held_by note_completion may_come_again record_end note_end keep_ends keeps free vacate tidy hand_on
-- OFTEN first_waiter want_in offer_to_run opens keeps_out held_alone paused resting taken full too_soon
-- OFTEN terms_for limit_now read_limits reserve grant_to grant_alone row_of integer claim_ms go dequeue
-- OFTEN is_in_woken write_run wake send push follows_another answer

local owner, run, ended, channel, destination, request = unpack(ARGV)
request = request and cjson.decode(request) or {}
local inbox, keep_run, keep_ms, unstarted = request.inbox, request.keep_run, request.keep_ms, request.unstarted
near_channel, near = channel, destination ~= '' and destination or nil
givers = run

local is_plain = not (tonumber(ended) > 1 or keep_ms or unstarted)
local others = is_plain and redis.call('EXISTS', QUEUE, TASKS) or 2

-- Releases an exclusive grant if there is nothing to record. Returns whether it did.
local function release_alone()
    local alone, rest = unpack(redis.call('HMGET', LOCK, 'x', 'rest'))
    if rest or not is_last_of(alone or '', owner, run) then
        return false
    end
    redis.call('DEL', LOCK)
    return true
end

-- Hands an exclusive grant over to the first waiter, if that is blocked and there is nothing to record but
-- the reservation. Returns whether it did.
local function hand_over_alone()
    local head, place = unpack(redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES'))
    local channel, waiter = string.match(head or '', '^b:(%S+) (.+)$')
    local alone, rest, was, started = unpack(redis.call('HMGET', LOCK, 'x', 'rest', 'was', 'start:' .. owner))
    if not channel or rest or was or started or not is_last_of(alone or '', owner, run) then
        return false
    elseif publish(channel, waiter) == 0 then
        return false
    end
    read_clock()
    if not write_alone(waiter, '', GRANT_MS, RESERVED, string.format('%d', place)) then
        return false
    end
    redis.call('ZREM', QUEUE, head)
    return true
end

-- Records the end of the run, as `ended` says.
local function note_completion(grant)
    if run == '' then
        return
    end
    local of = record(run)
    if ended == '3' then
        note_settling(run)
    elseif ended ~= '0' then
        local was_parked, again = of and forget_run(run), may_come_again(grant or held_by(run))
        if was_parked or ended == '2' or again then
            record_end(run, grant and not again and not (of and of.x))
        end
    elseif of and of.s == 'running' and not key.alone and held_by(run) then
        -- Its second delivery must not wait for the end of the lease.
        redis.call('ZADD', WOKEN, 'XX', integer(now_ms), run)
    end
end

-- Moves a waiting run to the head of the queue. Returns false if it does not wait.
local function put_first()
    local of = record(keep_run)
    if not of or not redis.call('ZSCORE', QUEUE, 'p:' .. keep_run) then -- it may be in flight
        return false
    end
    of.p, key.head = integer(FIRST), nil
    if last_turn() then
        enter_first('p:' .. keep_run, of.p, of.w)
    end
    redis.call('ZADD', QUEUE, 'XX', of.p, 'p:' .. keep_run)
    write_run(keep_run, of)
    return true
end

-- Whether the key must be reserved for keep_run.
local function keeps()
    if not keep_ms or put_first() then -- its message has arrived: it is served from the queue
        return false
    end
    local held = not key.alone and held_by(keep_run)
    return not (held and held.owner ~= owner) -- else it has a grant already
end

local function keep_locked(grant)
    local rests = string.find(keep_run, 'resting:', 1, true) == 1
    leave_start(reserved_owner(keep_run), now)
    redis.call('HDEL', LOCK, 'was', 'start:' .. owner)
    grant.flags = string.gsub(grant.flags, RECALLED .. 'n?%d*', '')
    pass(grant, reserved_owner(keep_run), keep_run, keep_ms, rests and RESTING or RESERVED)
    if rests then
        if grant.units > 0 then
            redis.call('HSET', LOCK, 'rests', 1)
            key.rests = '1'
        end
        look_ahead()
    end
end

-- The most frequent case: there are no waiters.
if others == 0 and release_alone() then
    return 1
end
if others == 1 and not inbox and hand_over_alone() then
    return 1
end
look(owner, run)
if others == 0 then
    key.head, key.tasks = {}, setmetatable({}, { __index = function() return false end })
else
    fetch_with_first(run, key.alone or key.grants[owner])
end
if ended == '0' or not record(run) then
    -- NEVER REFUSED
end
if unstarted then
    refund(owner)
end
local grant = grant_of(owner)
note_completion(grant)
local waited = inbox and remove_waiter('b:' .. inbox .. ' ' .. owner)
if not grant then
    if waited then
        free() -- the waiters behind it may be admitted
    end
    return woken[1] and answer(0) or 0
end
if keeps() then
    keep_locked(grant)
else
    free(grant)
end
return answer(1)
