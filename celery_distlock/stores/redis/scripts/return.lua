-- return.lua: suggest a retry delay to a caller that found the key taken and does not queue.
-- KEYS lock queue tasks returns
-- ARGV hold_ms least_ms most_ms
-- returns the delay in ms | -1: more than most_ms; no turn is assigned
--
-- hold_ms   how long such a task recently held its key; 0: unknown
-- least_ms  the least delay if a holder has had the key for longer than usual
--
-- returns  hash  next: the turn after the last one that was assigned (ms); hold: the usual hold (ms)
--
-- A turn is neither promised nor exclusive. It only spreads the retries, so that callers do not come all at
-- once, or long after the key is free.

local LOCK, QUEUE, TASKS, RETURNS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local hold_ms, least_ms, most_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local SHORTEST_MS = 10 -- for a hold, including the delivery of the message
local SHARE = 0.5 -- of a hold between two turns: two callers at a time are better than none
local OVERTIME = 0.75 -- a hold that is longer than usual is expected to last this part of its age more
local FEW = 64 -- grants that are read; with more, holds count as longer than usual
local SINCE = '^%d+ %d+ %-?%d+ %w+ %d+ (%d+) ' -- in a grant, as in grants.lua
local KEPT_MS = 60000 -- for which turns are remembered after the last one

-- Returns a field as a number; 0 if another program wrote something else there.
local function number(value)
    local found = tonumber(value or 0) or 0
    return found > 0 and found < 2 ^ 53 and found or 0
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000

local function age_ms(since)
    return since > 0 and math.max(0, now_ms - since / 1000) or 0
end

local function youngest_age_ms()
    local last = 0
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local since = string.sub(fields[i], 1, 2) == 'g:' and string.match(fields[i + 1], SINCE)
        last = math.max(last, number(since))
    end
    return last > 0 and now_ms - last / 1000 or 0
end

-- The following functions return in how many ms a request may be admitted, and the time between the
-- admissions after it (ms).

-- A hold has no known end: the older it is, the later the caller should retry.
local function by_age(age, hold)
    return math.max(OVERTIME * age, least_ms), math.max(hold, age)
end

-- One of several holders ends each hold/holders on average, unless all of them are late.
local function by_holders(holders, hold)
    local youngest = holders <= FEW and youngest_age_ms()
    if youngest and youngest <= hold then
        return hold / holders, hold / holders
    end
    local left_ms, longer = by_age(youngest or 0, hold)
    return left_ms, longer / holders
end

local function next_admission(hold, waiting)
    local token, alone, count, rest = unpack(redis.call('HMGET', LOCK, 'token', 'x', 'count', 'rest'))
    local limit = redis.call('HGET', TASKS, 'limit') or ''
    local until_ms, set_at = string.match(limit, '^0/?%S* (%d+) (%d+) ') -- a pause
    if until_ms == '0' then
        return by_age(age_ms(number(set_at)), hold)
    end
    local age, holders = age_ms(number(token)), number(count) -- the token is the time of the grant
    local ends_ms, stage = string.match(alone or '', '^(%d+) %d+ %-?%d+ (%a)')
    local opens_ms = math.max(number(until_ms), number(rest)) - now_ms
    if opens_ms > 0 then
        return math.max(hold - age, opens_ms), hold -- not earlier, even after a release
    elseif stage == 'z' then
        return number(ends_ms) - now_ms, hold -- it rests, and is not released earlier
    elseif holders > 1 then
        return by_holders(holders, hold)
    elseif age > hold or (waiting > 0 and not alone and holders == 0) then
        return by_age(age, hold) -- or it is free, and its first waiter has to wait, because of a rate for example
    end
    return hold - age, hold
end

local next_ms, usual_ms = unpack(redis.call('HMGET', RETURNS, 'next', 'hold'))
usual_ms = number(usual_ms)
if hold_ms > 0 then
    usual_ms = usual_ms > 0 and (usual_ms + hold_ms) / 2 or hold_ms
end
local waiting = redis.call('ZCARD', QUEUE)
local left_ms, apart_ms = next_admission(math.max(usual_ms, SHORTEST_MS), waiting)
local turn_ms = math.max(number(next_ms), now_ms + left_ms + waiting * apart_ms)
local wait_ms = math.ceil(turn_ms - now_ms)
-- A full server refuses these; then retries are not spread.
redis.pcall('HSET', RETURNS, 'hold', string.format('%.0f', usual_ms))
redis.call('PEXPIRE', RETURNS, most_ms + KEPT_MS)
if wait_ms > most_ms then
    return -1
end
redis.pcall('HSET', RETURNS, 'next', string.format('%.0f', turn_ms + SHARE * apart_ms))
return wait_ms
