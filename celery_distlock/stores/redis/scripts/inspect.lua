-- inspect.lua: report the state of a key. Changes nothing, except that it removes limits that have ended.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV [want]
-- returns fields as JSON: owner, token, run, ttl_ms, and those below; unknown ones are empty
--
-- oldest  arrival (µs) of the first waiter, if known; 0: no waiter
-- woken   number of runs in flight
-- task    the name of the task for which the key is reserved
-- limit   an operator's limits that have not ended, one a line (limits.lua)
-- starts  for each period in which starts are counted: limit, per (µs) and begun
-- admits  whether a request with this want would be granted now
-- later   number of deferred runs, the first of which joins the queue in due_ms; if there are many, runs
--         that were delivered already are included
-- opens_ms  in how many ms time alone admits the first waiter, if it does; or this want, if there is none
-- identities  number of identities in use; if there are many, obsolete ones are included
-- asked   when the holder was asked to leave (µs), and `n` before it if by a newer call
-- holders   some of the shared grants: owner, run, units, slot, since (µs), left_ms, asked, and the name
--         of the task if the grant is reserved
-- USES records grants limits rates gates runs answers queue calls

local MOST_HOLDERS = 100
local MOST_CALLS = 50 -- that are checked one by one
local grants, used = {}, 0

-- Reads the shared grants; of many, some.
local function read_grants()
    local are_all = key.count <= MANY
    grants = live_grants(not are_all and redis.call('HSCAN', LOCK, '0', 'COUNT', MANY)[2] or nil)
    for _, grant in ipairs(grants) do
        used = used + grant.units
        grant.since = math.min(tonumber(grant.since), EXACT)
    end
    table.sort(grants, function(one, other)
        return one.since < other.since or (one.since == other.since and one.owner < other.owner)
    end)
    used = are_all and used or key.used
end

-- Returns the number of runs in flight: woken, and their key not claimed yet.
local function count_woken()
    local many = redis.call('ZCARD', WOKEN)
    if many > 0 and key.alone then
        local has_come = held_by(key.alone.run) and redis.call('ZSCORE', WOKEN, key.alone.run)
        return many - (has_come and 1 or 0)
    end
    for number = 1, many > 0 and #grants or 0 do
        local run = grants[number].run
        if run ~= '' and grants[number].owner ~= reserved_owner(run) and redis.call('ZSCORE', WOKEN, run) then
            many = many - 1
        end
    end
    return many
end

local function starts_of(series)
    local count = 0
    for _, part in ipairs(series.parts) do
        count = count + (part[1] + series.per > now and part[2] or 0)
    end
    return count > 0 and { limit = series.limit, per = integer(series.per), begun = count } or nil
end

local function all_starts()
    local found = {}
    read_log()
    for _, series in ipairs(all_series()) do
        found[#found + 1] = starts_of(series)
    end
    return found
end

local function count_identities()
    local many = redis.call('HLEN', CALLS)
    if many == 0 or many > MOST_CALLS then
        return many
    end
    local alive = 0
    local found = redis.call('HGETALL', CALLS)
    for i = 2, #found, 2 do
        alive = alive + (taken_by(found[i]) and 1 or 0)
    end
    return alive
end

-- Returns the number of deferred runs, and in how many ms the first joins the queue.
local function count_later()
    local many = redis.call('ZCARD', LATER)
    local is_few = many <= MOST_CALLS
    local runs = many > 0 and redis.call('ZRANGE', LATER, 0, is_few and -1 or 0, 'WITHSCORES') or {}
    local first_ms
    for i = 1, #runs, 2 do
        local of = is_few and record(runs[i])
        if is_few and not (of and of.s == 'later') then
            many = many - 1 -- it was delivered already
        else
            first_ms = first_ms or tonumber(runs[i + 1])
        end
    end
    return many, math.max(0, math.ceil((first_ms or now_ms) - now_ms))
end

local function task_name(grant)
    local of = grant.run ~= '' and grant.owner == reserved_owner(grant.run) and record(grant.run)
    return of and of.t or ''
end

local function asked_of(grant)
    return string.match(grant.flags, RECALLED .. '(n?%d+)')
end

-- Returns the arrival of the first waiter.
local function oldest_arrival()
    local found = redis.call('ZRANGEBYSCORE', QUEUE, '(' .. FIRST, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    local member, place = unpack(found)
    return member and integer(place + 1000 * ahead_in(want_of(member).text))
end

read_clock()
load('', '')
local alone = key.alone
if alone and alone.ends <= now_ms then
    alone, key.alone = nil, nil
elseif key.count > 0 or key.is_spoilt then
    read_grants()
    key.used, key.count = used, key.count > MANY and key.count or #grants
end
local owner = alone and alone.owner or (#grants > 0 and 'several:') or ''
local ttl_ms = not alone and -2 or alone.ends < EXACT and math.floor(alone.ends - now_ms) or -1
local first = first_waiter(true)
local found = { owner = owner, token = key.token, run = alone and alone.run, ttl_ms = ttl_ms }
found.waiting, found.oldest, found.woken = redis.call('ZCARD', QUEUE), oldest_arrival(), count_woken()
limit_now() -- it removes those that have ended
found.task, found.limit, found.used = alone and task_name(alone), field('limit') or '', used
found.asked = alone and asked_of(alone)
found.capacity, found.rest_ms, found.starts = key.capacity, math.max(0, math.ceil(key.rest - now_ms)), all_starts()
local next_want = first and want_of(first) or ARGV[1] and want_in(ARGV[1])
local opens_at = next_want and opens(next_want)
found.opens_ms = in_ms(opens_at)
found.admits = ARGV[1] and not first and not opens_at or nil
found.later, found.due_ms = count_later()
found.identities, found.holders = count_identities(), {}
for number = 1, math.min(#grants, MOST_HOLDERS) do
    local grant = grants[number]
    local left_ms = math.floor(grant.ends - now_ms)
    local holder = { owner = grant.owner, run = grant.run, units = grant.units, slot = grant.slot }
    holder.since, holder.left_ms, holder.task = integer(grant.since), left_ms, task_name(grant)
    holder.asked = asked_of(grant)
    found.holders[number] = holder
end
return named(found)
