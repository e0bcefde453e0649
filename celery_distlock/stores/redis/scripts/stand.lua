-- stand.lua: have a run that needs several keys stand at one of them, or at one after the other: the
-- key is kept for it, or it waits in the queue. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done
-- ARGV run names first arrival owner departs [envelope desk]
-- returns {status, token, holder, holder_run, ttl_ms, place, wake_run, wake_envelope, arrival}, of
--         the last key at which it stands; status: reserved or parked | {'busy'}: it has been put
--         on its way | {'done'}: it has ended, or nobody knows it
--
-- After the first key's records may come those of the next, and so on: it stands there if it has
-- those before.
--
-- names     of all of its keys, in the order in which it takes them, with blanks between; in a
--           second line its task's
-- first     1: the first key given is the first of all, where its envelope lies
-- arrival   its place in all queues, as the answer at the first key told; there: when it came (µs),
--           or 0
-- owner     who holds the first key given for the run, and gives it up so, else empty
-- departs   1: all keys are given, and if it has them it is put on its way
-- envelope  when it begins to stand, at the first key
--
-- USES grant
-- USES queue
local run, names, first, arrival, owner, departs, envelope, desk = unpack(ARGV)
local own, member, parcel = 'parked:' .. run, 'p:' .. run, 'e:' .. run
local of_task = string.match(names, '\n(.*)$') or ''
local now = microseconds()
local stands = tonumber(arrival) or 0
envelope = envelope or ''

-- Finds its place in all queues, where its envelope lies; or returns why it stands nowhere.
local function find_place()
    if redis.call('ZSCORE', DONE, run) then
        return 'done'
    end
    if envelope == '' and redis.call('HEXISTS', TASKS, 'k:' .. run) == 0 then
        local runs = redis.call('HGET', LOCK, 'run') == run
        return (runs or redis.call('HEXISTS', TASKS, parcel) == 1) and 'busy' or 'done'
    end
    local before = redis.call('HGET', TASKS, 's:' .. run) or redis.call('HGET', LOCK, 'stamp:' .. run)
    stands = tonumber(before or stands)
    if stands == 0 or stands > now + AHEAD then
        local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
        stands = math.max(now, tonumber(last or '0') + 1)
    end
end

local function join()
    if envelope ~= '' then -- before all other writes: a full server may refuse what is new to it
        redis.call('HSET', TASKS, parcel, envelope, 'h:' .. run, desk)
    end
    redis.call('ZREM', WOKEN, run)
    if redis.call('HEXISTS', TASKS, parcel) == 0 then
        redis.call('HSET', TASKS, parcel, '')
    end
    local since = integer(stands)
    redis.call('HSET', TASKS, 'k:' .. run, names, 's:' .. run, since, 't:' .. run, of_task)
    redis.call('ZADD', QUEUE, since, member)
end

-- Whether the key is kept for it; if it went to another one, also what hand_over says of him.
local function stand_here()
    local holder, holder_run, due = unpack(redis.call('HMGET', LOCK, 'owner', 'run', 'due'))
    local later = holder ~= own and holder == 'parked:' .. (holder_run or '')
    later = later and redis.call('HEXISTS', TASKS, 'k:' .. holder_run) == 1
    local overtakes = later and stands < (tonumber(due or 0) or 0)
    local gives_way = holder == own and redis.call('ZRANGE', QUEUE, 0, 0)[1] ~= member
    if (holder and holder == owner) or overtakes or gives_way then
        redis.call('DEL', LOCK) -- kept for one of those that wait elsewhere, who came later; or ours
        holder = nil
    end
    if not holder then
        local next_run, next_envelope = hand_over(member, 0)
        if next_run ~= true then
            return false, next_run, next_envelope
        end
        redis.call('HSET', LOCK, 'stamp:' .. run, integer(stands))
        return keep_for(now, run, integer(stands), CLAIM_MS)
    end
    if holder == own and redis.call('HEXISTS', LOCK, 'stamp:' .. run) == 0 then
        redis.call('PEXPIRE', LOCK, CLAIM_MS) -- once: it is not kept for as long as others ask
        redis.call('HSET', LOCK, 'due', integer(stands), 'stamp:' .. run, integer(stands))
    end
    return holder == own
end

local reserved, wake_run, wake_envelope
local given = #KEYS / 6
for number = 1, given do
    turn_to(number)
    local elsewhere
    if number > 1 then
        owner, envelope = '', ''
    elseif first == '1' then
        elsewhere = find_place()
    end
    if elsewhere then
        return { elsewhere }
    end
    join()
    reserved, wake_run, wake_envelope = stand_here()
    if not reserved then
        break
    end
end
local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run')
local ttl_ms, place = redis.call('PTTL', LOCK), redis.call('ZRANK', QUEUE, member)
if reserved and departs == '1' then
    for number = given, 1, -1 do
        turn_to(number)
        wake_run, wake_envelope = depart(now, run, number == 1)
    end
end
local status, since = reserved and 'reserved' or 'parked', integer(stands)
wake_run, wake_envelope = wake_run or '', wake_envelope or ''
return { status, held[2], held[1], held[3], ttl_ms, place, wake_run, wake_envelope, since }
