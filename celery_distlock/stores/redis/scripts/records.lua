-- records.lua: the names of a key's records, the server's clock, tokens, and messages to processes.
-- KEYS lock queue tasks woken fence done rate
--
-- lock   hash    the grants of the key, as grants.lua writes them; expires with the last of them
-- queue  zset    waiters, by arrival (µs): "p:<run>" parked, "b:<inbox> <owner>" blocked
-- tasks  hash    the parked runs, as runs.lua writes them; w:<member> the want of a blocked waiter that
--                does not want all of the key; limit: as limits.lua writes it
-- woken  zset    runs that are with a worker or the broker, by the time (ms) at which a sweep looks
--                for them
-- fence  string  the last token: the time (µs) of the grant, or more if the clock was set back
-- done   zset    runs that have ended and whose message may come again, by their end (ms); as
--                "~<run>" those whose result is not stored yet, by the time (ms) when their process is
--                taken for dead; as "+<run>" those of which the broker may have another message, by
--                the time (ms) until which their end must be known
-- rate   hash    the starts of late, as rates.lua writes them

local RECORDS = 7 -- of each key
local LOCK, QUEUE, TASKS, WOKEN, FENCE, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RATE = KEYS[7]

local EXACT = 2 ^ 53 -- no number beyond it is a token of ours
local FENCE_MS = 3600000 -- a token only has to outlive a clock that was set back
local now, now_ms, clock = 0, 0, '0' -- as read_clock() found it; and `now` in writing

-- A Lua number is a double: microseconds fit exactly, but tostring() would round them.
local function integer(number)
    return number == now and clock or string.format('%.0f', number)
end

local function read_clock()
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
    now_ms = now / 1000
    clock = time[1] .. string.sub('00000' .. time[2], -6)
end

-- Returns a token above all before; or nothing, and the refusal of a full server.
local function mint()
    local token = integer(now)
    local last = redis.pcall('SET', FENCE, token, 'PX', FENCE_MS, 'GET')
    if type(last) == 'table' then
        return nil, last
    end
    local before = last and tonumber(last)
    if before and before >= now and before < EXACT then
        token = integer(before + 1)
        redis.call('SET', FENCE, token, 'PX', FENCE_MS)
    end
    return token
end

-- Returns fields as an answer names them. No answer has an infinite number, which a record that others
-- have spoilt may have, but the greatest instead.
local function named(fields)
    for name, value in pairs(fields) do
        if type(value) == 'number' and not (math.abs(value) < EXACT) then
            fields[name] = EXACT
        end
    end
    return cjson.encode(fields)
end

-- Returns how many subscribers got the message; an error, for want of a permission say, tells nothing.
local function publish(channel, message)
    if string.find(channel, '{', 1, true) then
        return redis.pcall('SPUBLISH', channel, message) -- of this slot: no other node is told
    end
    return redis.pcall('PUBLISH', channel, message)
end
