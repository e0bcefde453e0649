-- release.lua: give the key up, or a place in its queue, and hand the key to the next waiter.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner run ended [channel destination request]
-- returns 1 given up | 0 was not ours | as queue.lua's `reply`: given up, and whom that lets in
--
-- ended     0: the run has not ended (its process is being killed, its message goes back).
--           1: it has; a second delivery of it that is parked is dropped.
--           2: it has, and a second delivery that comes later is to be recognised.
--           3: its body has, and its result is not stored yet: a second delivery is held back.
-- channel   of the worker that asks: what was sent to this destination, and waits, is pushed there
-- request   JSON; what is not in it is false:
-- inbox     where a blocked waiter that gives up had waited
-- keep_ms   how long the key stays locked for keep_run to claim; if that is parked already, the
--           key is handed to it now
-- unstarted what was taken has come to nothing, and is not counted where the key has a rate
-- USES records grants limits rates gates runs answers queue
-- OFTEN look read_clock load known_number fetch_with_first fetch field run_of record read_record
-- OFTEN grant_of reserved_owner held_by note_completion record_end note_end keep_ends keeps free
-- OFTEN vacate tidy hand_on first_waiter want_in offer_to_run opens keeps_out held_alone paused
-- OFTEN resting taken full too_soon limit_now read_limit reserve grant_to grant_alone mint row_of
-- OFTEN integer begin_lease claim_ms wake go write_run send push follows_another publish answer

local owner, run, ended, channel, destination, request = unpack(ARGV)
request = request and cjson.decode(request) or {}
local inbox, keep_run, keep_ms, unstarted = request.inbox, request.keep_run, request.keep_ms, request.unstarted
near_channel, near = channel, destination ~= '' and destination or nil
givers = run

-- Answers most releases: nobody waits, nothing is to be noted.
local function release_alone()
    if tonumber(ended) > 1 or keep_ms or unstarted or redis.call('EXISTS', QUEUE, TASKS) > 0 then
        return nil
    end
    local alone, rest = unpack(redis.call('HMGET', LOCK, 'x', 'rest'))
    local grant = read_grant(alone)
    if not grant or rest or may_come_again(grant) then
        return nil
    elseif grant.owner ~= owner then
        return 0
    end
    redis.call('DEL', LOCK)
    return 1
end

-- Notes what is said of the end of the run.
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
        -- Its second delivery is not to wait for the end of its lease.
        redis.call('ZADD', WOKEN, 'XX', integer(now_ms), run)
    end
end

-- Puts a run that waits before all who do; false: it does not wait.
local function put_first()
    local of = record(keep_run)
    if not of or not redis.call('ZSCORE', QUEUE, 'p:' .. keep_run) then -- it may have stepped back
        return false
    end
    of.p, key.head = integer(FIRST), nil
    redis.call('ZADD', QUEUE, 'XX', of.p, 'p:' .. keep_run)
    write_run(keep_run, of)
    return true
end

-- Whether the key is to be kept for a run that has to come for it.
local function keeps()
    if not keep_ms or put_first() then -- its message came before, and nobody else would send it
        return false
    end
    local held = not key.alone and held_by(keep_run)
    return not (held and held.owner ~= owner) -- else it has its part already
end

local function keep_locked(grant)
    local rests = string.find(keep_run, 'resting:', 1, true) == 1
    leave_start(reserved_owner(keep_run), now)
    redis.call('HDEL', LOCK, 'was', 'start:' .. owner)
    pass(grant, reserved_owner(keep_run), keep_run, keep_ms, rests and RESTING or RESERVED)
    if rests then
        if grant.units > 0 then
            redis.call('HSET', LOCK, 'rests', 1)
            key.rests = '1'
        end
        look_ahead()
    end
end

local released = release_alone()
if released then
    return released
end
look(owner, run)
fetch_with_first(run)
if ended == '0' or not record(run) then
    -- NEVER REFUSED
end
if unstarted then
    refund(owner, now)
end
local grant = grant_of(owner)
note_completion(grant)
local waited = inbox and strike('b:' .. inbox .. ' ' .. owner)
if not grant then
    if waited then
        free() -- those behind it may fit
    end
    return woken[1] and answer(0) or 0
end
if keeps() then
    keep_locked(grant)
else
    free(grant)
end
return answer(1)
