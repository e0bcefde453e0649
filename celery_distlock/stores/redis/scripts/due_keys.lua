-- due_keys.lua: find the keys at which a sweep has something to do. A key that is held exclusively, or has
-- only delayed calls, is left out until a lease, a reservation or a delay ends, or a run leaves the queue.
-- KEYS lock queue woken later calls leaving
-- returns the numbers of these keys

local RECORDS = 6 -- of each key
local NEVER = 1 / 0
local SOON_MS = 60000 -- before a run joins or leaves: the ticker may have lost its note of it
local LOCK, QUEUE, WOKEN, LATER, CALLS, LEAVING = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

-- Whether an exclusive grant is held: not reserved, kept or resting (grants.lua).
local function is_held()
    local row = redis.pcall('HGET', LOCK, 'x')
    local ends = type(row) == 'string' and string.match(row, '^(%d+) 0 %-1 h')
    return ends and tonumber(ends) > now_ms
end

-- Returns the first score that was found; 0 if another program wrote the record: the sweep reports it.
local function first_of(found)
    return found.err and 0 or tonumber(found[2] or NEVER)
end

local function is_due()
    local held = is_held()
    if redis.call('EXISTS', WOKEN, LATER, CALLS, LEAVING) == 0 then
        return not held or redis.call('EXISTS', QUEUE) == 0 -- without waiters, it leaves the index
    elseif redis.call('EXISTS', CALLS) == 1 or (not held and redis.call('EXISTS', LOCK, QUEUE) > 0) then
        return true
    end
    return first_of(redis.pcall('ZRANGE', WOKEN, 0, 0, 'WITHSCORES')) <= now_ms
        or first_of(redis.pcall('ZRANGE', LATER, 0, 0, 'WITHSCORES')) <= now_ms + SOON_MS
        or first_of(redis.pcall('ZRANGE', LEAVING, 0, 0, 'WITHSCORES')) <= now_ms + SOON_MS
end

local due = {}
for number = 1, #KEYS / RECORDS do
    local last = RECORDS * number
    LOCK, QUEUE, WOKEN, LATER, CALLS, LEAVING = unpack(KEYS, last - RECORDS + 1, last)
    if is_due() then
        due[#due + 1] = number
    end
end
return due
