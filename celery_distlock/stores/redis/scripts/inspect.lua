-- inspect.lua: look at a key without changing it, but that it may strike what has lapsed.
-- KEYS lock queue tasks woken fence done rate later calls
-- returns fields as JSON: owner, token, run, ttl_ms, and those below; what is not known is empty
--
-- oldest  when the first of those who wait came (µs), as far as that is known; 0: nobody
-- woken   how many runs are on their way
-- task    the name of the one that the key is kept for
-- limit   an operator's that has not ended, as limits.lua has it
-- starts  of each time for which starts are counted limit, per (µs) and begun
-- later   how many runs join the queue later, the first of them in due_ms; of many, with those that
--         have come by themselves
-- opens_ms  in how many ms time alone lets the first waiter enter, if it does
-- identities  how many calls are known by an identity; of many, with those that mean nothing any more
-- holders   some of those that share it: owner, run, units, slot, since (µs), left_ms, and
--         the task of one that is on its way
-- USES grant units times calls

local MOST_HOLDERS = 100
local FIRST = 1 -- µs: where one stands before whom nobody is to go, whenever he came
local MOST_CALLS = 50 -- that are looked at one by one
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local now_ms = now / 1000
local fields = { 'owner', 'token', 'run', 'used', 'capacity', 'rest' }
local held = redis.call('HMGET', LOCK, unpack(fields))
local rest_ms = held[6] and math.max(0, math.ceil((tonumber(held[6]) or 0) - now_ms)) or 0

local shares, used, on_their_way = {}, 0, {}
local function add_share(owner, entry)
    local ends, units, slot, since, run = string.match(entry, '^(%d+) (%d+) (%-?%d+) %d+ (%d+) (.*)$')
    if ends and tonumber(ends) > now_ms then
        used = used + tonumber(units)
        local share = { owner = owner, run = run, units = tonumber(units), slot = tonumber(slot) }
        share.since, share.left_ms = since, math.ceil(tonumber(ends) - now_ms)
        shares[#shares + 1] = share
        on_their_way[run] = owner == 'parked:' .. run
    end
end
if held[1] == 'several:' then
    local found = redis.call('HGETALL', LOCK)
    for i = 1, #found, 2 do
        local owner = string.match(found[i], '^h:(.*)$')
        if owner then
            add_share(owner, found[i + 1])
        end
    end
    table.sort(shares, function(one, other)
        return tonumber(one.since) < tonumber(other.since)
    end)
end

local oldest = redis.call('ZRANGEBYSCORE', QUEUE, '(' .. FIRST, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
local woken, waiting = redis.call('ZCARD', WOKEN), redis.call('ZCARD', QUEUE)
local task
if held[3] and held[1] == 'parked:' .. held[3] then
    task = redis.call('HGET', TASKS, 't:' .. held[3])
elseif woken > 0 and held[3] then
    local come = { [held[3]] = false }
    for run, is_on_its_way in pairs(on_their_way) do
        come[run] = is_on_its_way
    end
    for run, is_on_its_way in pairs(come) do
        if not is_on_its_way and run ~= '' and redis.call('ZSCORE', WOKEN, run) then
            woken = woken - 1 -- it has come
        end
    end
end
local limit = redis.call('HGET', TASKS, 'limit') or ''
local ends_ms = tonumber(string.match(limit, '^%S+ (%d+) ') or 0)
if ends_ms > 0 and ends_ms <= now_ms then
    limit = ''
end
local starts = {}
local function add_starts(per, series)
    local limit, parts = string.match(series, '^%d+ %d+ (%d+)(.*)$')
    local count = 0
    for last, many in string.gmatch(parts or '', ' (%d+) (%d+)') do
        count = count + (tonumber(last) + per > 1000 * now_ms and tonumber(many) or 0)
    end
    if count > 0 then
        starts[#starts + 1] = { limit = tonumber(limit), per = integer(per), begun = count }
    end
end
local counted = redis.call('EXISTS', RATE) == 1 and redis.call('HGETALL', RATE) or {}
for i = 1, #counted, 2 do
    local per = tonumber(string.match(counted[i], '^p:(%d+)$') or '')
    if per then
        add_starts(per, counted[i + 1])
    end
end

local look = { owner = held[1], token = held[2], run = held[3], ttl_ms = redis.call('PTTL', LOCK) }
look.waiting, look.oldest, look.woken, look.task = waiting, oldest, woken, task
look.limit, look.used, look.capacity, look.rest_ms, look.starts = limit, used, held[5], rest_ms, starts
look.holders = { unpack(shares, 1, math.min(#shares, MOST_HOLDERS)) }
for _, share in ipairs(look.holders) do
    share.task = share.owner == 'parked:' .. share.run and redis.call('HGET', TASKS, 't:' .. share.run)
end
if waiting == 0 and redis.call('EXISTS', LATER, CALLS) == 0 then
    return named(look) -- most keys
end

local function count_identities()
    local many = redis.call('HLEN', CALLS)
    if many == 0 or many > MOST_CALLS then
        return many
    end
    local alive = 0
    local found = redis.call('HGETALL', CALLS)
    for i = 2, #found, 2 do
        alive = alive + (taken_by(found[i], now_ms) and 1 or 0)
    end
    return alive
end

-- How many join the queue later, and in how many ms the first of them.
local function count_later()
    local many = redis.call('ZCARD', LATER)
    local is_few = many <= MOST_CALLS
    local runs = many > 0 and redis.call('ZRANGE', LATER, 0, is_few and -1 or 0, 'WITHSCORES') or {}
    local first_ms
    for i = 1, #runs, 2 do
        if is_few and not is_put_off(runs[i]) then
            many = many - 1 -- it has come by itself
        else
            first_ms = first_ms or tonumber(runs[i + 1])
        end
    end
    return many, math.max(0, math.ceil((first_ms or now_ms) - now_ms))
end

local first = waiting > 0 and first_in_line()
look.opens_ms = first and opens_in(now, first) or nil
look.later, look.due_ms = count_later()
look.identities = count_identities()
return named(look)
