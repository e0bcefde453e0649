-- records.lua: a key's records, the server's clock, fencing tokens, and notifications.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- lock   hash    the grants (grants.lua); expires with the last of them
-- queue  zset    waiters, by arrival (µs): "p:<run>" parked, "b:<inbox> <owner>" blocked
-- tasks  hash    the parked runs (runs.lua); w:<member> the want of a blocked waiter that wants a share;
--                limit: an operator's limit (limits.lua)
-- woken  zset    runs that a worker or the broker has, by the time (ms) when the sweep checks them
-- fence  string  the last token: the time (µs) of the grant, or more if the clock was set back
-- done   zset    runs that have ended and whose message may be delivered again, by their end (ms);
--                "~<run>": the result is not stored yet, by the time (ms) when the process counts as
--                dead; "+<run>": the broker may have another message, by the time (ms) until which the
--                end must be remembered
-- rate   hash    recent starts (rates.lua)
-- lanes  zset    the waiters by their lanes, if some have one (lanes.lua)

local RECORDS = 8 -- of each key
local LOCK, QUEUE, TASKS, WOKEN, FENCE, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RATE, LANES = KEYS[7], KEYS[8]

local EXACT = 2 ^ 53 -- above it, whole numbers are not exact
local FENCE_MS = 3600000 -- longer than any clock is set back
local key = { tasks = {}, runs = {} } -- what this call has read of the key
local all_keys = {}
local now, now_ms, clock = 0, 0, '0' -- set by read_clock(): µs, ms, and µs as text

-- Returns a whole number as text. tostring() would round microseconds.
local function integer(number)
    return number == now and clock or string.format('%d', math.floor(math.min(number, EXACT) + 0.5))
end

local function read_clock()
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
    now_ms = now / 1000
    clock = time[1] .. string.sub('00000' .. time[2], -6)
end

-- Returns a token above all earlier ones; or nothing, and the refusal of a full server.
local function mint()
    local token = clock
    local last = redis.pcall('SET', FENCE, token, 'PX', FENCE_MS, 'GET')
    if type(last) == 'table' then
        return nil, last
    end
    local before = last and tonumber(last)
    if before and before >= now and before < EXACT then
        token = string.format('%d', before + 1)
        redis.call('SET', FENCE, token, 'PX', FENCE_MS)
    end
    return token
end

-- Encodes named fields as JSON, which has no infinite numbers: a record that another program wrote may
-- contain one.
local function named(fields)
    for name, value in pairs(fields) do
        if type(value) == 'number' and not (math.abs(value) < EXACT) then
            fields[name] = EXACT
        end
    end
    return cjson.encode(fields)
end

-- Publishes a message. Returns the number of subscribers that received it, or an error table.
local function publish(channel, message)
    if string.find(channel, '{', 1, true) then
        return redis.pcall('SPUBLISH', channel, message) -- stays within the shard
    end
    return redis.pcall('PUBLISH', channel, message)
end

-- Switches to the key with this number in KEYS.
local function turn_to(number)
    local last = RECORDS * number
    LOCK, QUEUE, TASKS, WOKEN, FENCE, DONE, RATE, LANES = unpack(KEYS, last - RECORDS + 1, last)
    all_keys[number] = all_keys[number] or { tasks = {}, runs = {}, number = number }
    key = all_keys[number]
end

-- Returns a field of `tasks`; reads it once.
local function field(name)
    if key.tasks[name] == nil then
        key.tasks[name] = redis.call('HGET', TASKS, name)
    end
    return key.tasks[name]
end

-- Reads several fields of `tasks` with one command.
local function fetch(...)
    local found, names = redis.call('HMGET', TASKS, ...), { ... }
    for number = 1, #names do
        key.tasks[names[number]] = found[number]
    end
end

-- Returns a number that another program may have overwritten.
local function known_number(text)
    local number = tonumber(text or 0)
    return number and number == number and number or 0
end
