-- try_key.lua: have a run that needs several keys stand at one of them, or at one after the other: the
-- key is kept for it, or it waits in the queue. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run names first arrival owner departs [envelope channel]
-- returns {status, token, holder, holder_run, ttl_ms, place, arrival, number, wake_run,
--         wake_envelope, ...}, of the last key at which it stands; status: reserved or parked; then
--         who was woken at the first, the second, ... of the keys; beside an empty run, in how many
--         ms time alone lets somebody enter | {'busy'}: it has been put on its way | {'done'}: it has ended, or nobody knows it
--
-- After the first key's records may come those of the next, and so on: it stands there if it has
-- those before.
--
-- names     of all of its keys, in the order in which it takes them, with blanks between; in a
--           second line its task's; in a third one what it wants of each, as in acquire.lua
-- first     1: the first key given is the first of all, where its envelope lies
-- arrival   its place in all queues, as the answer at the first key told; there: when it came (µs),
--           or 0
-- owner     who holds the first key given for the run, and gives it up so, else empty
-- departs   1: all keys are given, and if it has them it is put on its way
-- envelope  when it begins to stand, at the first key
-- USES grant units queue

local run, names, first, arrival, owner, departs, envelope, channel = unpack(ARGV)
local own, member, field = 'parked:' .. run, 'p:' .. run, 'e:' .. run
local all_names, of_task, all_wants = string.match(names .. '\n\n', '^([^\n]*)\n([^\n]*)\n([^\n]*)')
local now = microseconds()
local stands = tonumber(arrival) or 0
envelope = envelope or ''

-- Finds its place in all queues, where its envelope lies; or returns why it stands nowhere.
local function find_place()
    if redis.call('ZSCORE', DONE, run) then
        return 'done'
    end
    if envelope == '' and redis.call('HEXISTS', TASKS, 'k:' .. run) == 0 then
        local runs = redis.call('HGET', LOCK, 'run') == run or keeps_for(run) or holds(run, now)
        return (runs or redis.call('HEXISTS', TASKS, field) == 1) and 'busy' or 'done'
    end
    local before = redis.call('HGET', TASKS, 's:' .. run) or redis.call('HGET', LOCK, 'stamp:' .. run)
    stands = before and tonumber(before) or place_of(stands, now)
    if stands == 0 then
        local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
        stands = math.max(now, tonumber(last or '0') + 1)
    end
end

local function join()
    if envelope ~= '' then -- before all other writes: a full server may refuse what is new to it
        redis.call('HSET', TASKS, field, envelope, 'h:' .. run, channel)
        redis.call('HDEL', TASKS, 'n:' .. run)
    end
    if redis.call('HEXISTS', TASKS, field) == 0 then
        redis.call('HSET', TASKS, field, '')
    end
    local since = integer(stands)
    redis.call('HSET', TASKS, 'k:' .. run, names, 's:' .. run, since, 't:' .. run, of_task)
    redis.call('ZADD', QUEUE, since, member)
    redis.call('ZREM', WOKEN, run) -- only then: a script may be broken off
end

-- What it wants of the key whose records these are.
local function note_what_it_wants()
    local name = string.match(LOCK, '{(.*)}:lock$')
    local wants = string.gmatch(all_wants, '%S+')
    for each in string.gmatch(all_names, '%S+') do
        local want = wants()
        if each == name then
            note_want(member, want)
        end
    end
end

local woken = {} -- number of the key, run, envelope, ...

local function note_woken(number, wake_run, wake_envelope)
    for _, each in ipairs(wake_run ~= '' and { number, wake_run, wake_envelope } or {}) do
        woken[#woken + 1] = each
    end
    for i = 1, #also, 2 do
        woken[#woken + 1] = number
        woken[#woken + 1] = also[i]
        woken[#woken + 1] = also[i + 1]
    end
    also = {}
end

-- Has it take its part of the key, if it is its turn.
local function take_part(number)
    local units, capacity, terms = want_of(member)
    local last, wake_run, wake_envelope = hand_on(now, member, 0)
    note_woken(number, wake_run, wake_envelope)
    if last ~= true or not admits(units, capacity, now, terms) then
        return false
    end
    redis.call('HSET', LOCK, 'stamp:' .. run, integer(stands))
    return keep_for(now, run, integer(stands), CLAIM_MS, units, capacity, terms)
end

-- Of a key that several have: whether a part is kept for it.
local function stand_beside_others(number)
    if owner ~= '' then
        refund(owner, now)
        vacate(owner, now) -- its own
    end
    local share = share_of(own)
    if share and redis.call('HEXISTS', LOCK, 'stamp:' .. run) == 0 then
        keep_longer(now, run, CLAIM_MS) -- once
        share = share_of(own)
        share.due = stands
        write_share(own, share)
        redis.call('HSET', LOCK, 'stamp:' .. run, integer(stands))
    end
    if share then
        return true
    end
    local units, capacity, terms = want_of(member)
    if may_make_room(stands) and not admits(units, capacity, now, terms) then
        make_room(now, stands, units, capacity, terms)
    end
    return take_part(number)
end

-- Whether the key is kept for it.
local function stand_here(number)
    local holder, holder_run, due = unpack(redis.call('HMGET', LOCK, 'owner', 'run', 'due'))
    if holder == SHARED then
        return stand_beside_others(number)
    end
    local later = holder ~= own and holder == 'parked:' .. (holder_run or '')
    later = later and redis.call('HEXISTS', TASKS, 'k:' .. holder_run) == 1
    local overtakes = later and stands < (tonumber(due or 0) or 0)
    local gives_way = holder == own and redis.call('ZRANGE', QUEUE, 0, 0)[1] ~= member
    if (holder and holder == owner) or overtakes or gives_way then
        refund(holder, now)
        vacate(holder, now) -- kept for one of those that wait elsewhere, who came later; or ours
        holder = nil
    end
    if not holder then
        return take_part(number)
    end
    if holder == own and redis.call('HEXISTS', LOCK, 'stamp:' .. run) == 0 then
        redis.call('PEXPIRE', LOCK, CLAIM_MS) -- once: it is not kept for as long as others ask
        outlive_rest(now)
        redis.call('HSET', LOCK, 'due', integer(stands), 'stamp:' .. run, integer(stands))
    end
    return holder == own
end

local reserved, last
for number = 1, #KEYS / RECORDS do
    turn_to(number)
    prune(now)
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
    note_what_it_wants()
    reserved, last = stand_here(number), number
    if not reserved then
        break
    end
end
if not reserved and redis.call('ZRANK', QUEUE, member) == 0 then
    look_ahead(now)
    note_woken(last, '', '')
end
local held_by, token, held_for = one_holder()
local ttl_ms, place = redis.call('PTTL', LOCK), redis.call('ZRANK', QUEUE, member)
if reserved and departs == '1' then
    for number = last, 1, -1 do
        turn_to(number)
        note_woken(number, depart(now, run, number == 1))
    end
end
local status, since = reserved and 'reserved' or 'parked', integer(stands)
return { status, token, held_by, held_for, ttl_ms, place, since, unpack(woken) }
