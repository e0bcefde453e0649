-- acquire.lua: take the key, or join its queue, or learn who holds it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done
-- ARGV owner lease_ms mode run repeated arrival [keep detail desk task]
-- returns token: granted | {status, token, holder, holder_run, ttl_ms, place, wake_run,
--         wake_envelope, arrival}: status busy or parked | {'done'}
--
-- mode      try: do not queue. wait: queue as a blocked waiter, detail is its inbox.
--           park: queue the run, detail is its envelope, desk where a worker would take it,
--           task the name that is shown to those who look.
--           line: as park, but neither take the key nor hand it over, not even if it is free:
--           somebody comes for it, or else who lines up has it looked after.
-- repeated  1 if the run's message may have been delivered before
-- arrival   when the caller came (µs): by this server's clock as others know it, or as an earlier
--           answer told; 0: it comes now
-- keep      1 if nobody else has the run's message: it stays here until the run has ended
--
-- USES grant
local owner, lease_ms, mode, run, repeated, arrival, keep, detail, desk, task = unpack(ARGV)

local asks = mode == 'try' or mode == 'wait'
if asks and repeated == '0' and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0 then
    -- Nobody holds it, nobody waits: most requests end here.
    local token, refused = grant(microseconds(), owner, run, lease_ms)
    return refused or token
end

-- USES queue
local function keep_parcel()
    redis.call('HSET', TASKS, 'e:' .. run, detail, 'h:' .. run, desk)
    if task ~= '' then
        redis.call('HSET', TASKS, 't:' .. run, task)
    end
end

-- What a second delivery is told; nothing if it may run.
local function second_delivery()
    if redis.call('ZSCORE', DONE, run) then
        return { 'done' }
    end
    local until_ms = redis.call('ZSCORE', DONE, '~' .. run)
    local held_back = until_ms and tonumber(until_ms) - microseconds() / 1000
    if held_back and held_back > 0 then
        -- The first one's result is being stored; if that does not come to pass, this one runs.
        local status = 'busy'
        if not asks then
            keep_parcel()
            redis.call('ZADD', WOKEN, until_ms, run)
            status = 'parked'
        end
        return { status, 0, '', run, math.ceil(held_back), 0, '', '', '0' }
    end
end

local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run', 'due')
local holder = held[1]
local reserved = run ~= '' and (holder == 'parked:' .. run or (holder == owner and held[3] ~= run))
if reserved and repeated == '1' then
    local answer = second_delivery()
    if answer then -- its turn came, but the first one has ended
        redis.call('DEL', LOCK)
        local wake_run, envelope = hand_over('', 0)
        return { answer[1], 0, '', run, answer[5] or 0, 0, wake_run or '', envelope or '', '0' }
    end
end
if holder == owner then
    lengthen(lease_ms)
    redis.call('HDEL', LOCK, 'due')
    if run ~= '' and held[3] ~= run then
        redis.pcall('HSET', LOCK, 'run', run) -- a blocked waiter was granted it without
        arrive(microseconds(), run, keep, lease_ms)
    end
    return held[2]
end
if run ~= '' and holder == 'parked:' .. run then
    if mode == 'line' then
        -- Likewise parked before, by a request that was repeated: its message is on its way as well.
        return { 'done' }
    end
    local token = claim(microseconds(), owner, run, keep, lease_ms)
    if mode == 'park' then
        -- It was parked by an earlier request of ours, whose answer was lost, and has been woken
        -- since: its message is on its way as well.
        redis.call('HSET', LOCK, 'again', 1)
    end
    return token
end

local member = ''
if mode == 'wait' then
    member = 'b:' .. detail .. ' ' .. owner
elseif run ~= '' then
    member = 'p:' .. run
end

-- Who parks may have been parked before, by a request whose answer was lost.
if repeated == '1' or not asks then
    local answer = second_delivery()
    if answer then
        if mode == 'wait' then
            redis.call('ZREM', QUEUE, member)
        end
        return answer
    end
end

local now = microseconds()
local stands = tonumber(redis.call('HGET', TASKS, 's:' .. run)) or math.min(arrival, now + AHEAD)
local wake_run, wake_envelope = '', ''
local overtakes = holder and stands > 0 and stands < (tonumber(held[4] or 0) or 0)
overtakes = overtakes and (holder == 'parked:' .. held[3] or redis.call('PTTL', LOCK) <= GRANT_MS)
if overtakes and mode ~= 'line' then
    -- It was handed to one who came later, and has not come for it: who is here goes before.
    step_back(holder, held[4])
    holder = nil
end
if not holder and mode ~= 'line' then
    local next_run, envelope
    if not overtakes and not (run ~= '' and redis.call('ZSCORE', WOKEN, run)) then
        next_run, envelope = hand_over(member, stands)
    end
    if not next_run or next_run == true then
        local token, refused = grant(now, owner, run, lease_ms)
        if not token then
            return refused
        end
        if run ~= '' then
            arrive(now, run, keep, lease_ms)
        end
        if member ~= '' then
            redis.call('ZREM', QUEUE, member)
        end
        return token
    end
    wake_run, wake_envelope = next_run, envelope
    held = redis.call('HMGET', LOCK, 'owner', 'token', 'run')
end

local status = 'busy'
if mode ~= 'try' then
    if stands == 0 then
        local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
        stands = math.max(now, tonumber(last or '0') + 1)
    end
    if mode ~= 'wait' then
        keep_parcel()
        redis.call('HSET', TASKS, 's:' .. run, integer(stands))
        redis.call('HDEL', TASKS, 'n:' .. run, 'd:' .. run)
        redis.call('ZREM', WOKEN, run)
        status = 'parked'
    end
    redis.call('ZADD', QUEUE, 'NX', integer(stands), member)
    stands = tonumber(redis.call('ZSCORE', QUEUE, member))
end
local place = redis.call('ZRANK', QUEUE, member) or redis.call('ZCARD', QUEUE)
local ttl_ms = redis.call('PTTL', LOCK)
local since = integer(stands)
local token, owned_by, held_for = held[2] or '0', held[1] or '', held[3] or ''
return { status, token, owned_by, held_for, ttl_ms, place, wake_run, wake_envelope, since }
