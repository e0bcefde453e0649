-- return.lua: suggest a retry delay to a caller that found the key taken and does not queue.
-- KEYS lock queue tasks returns
-- ARGV hold_ms least_ms most_ms
-- returns the delay in ms | -1: more than most_ms; no turn is assigned
--
-- hold_ms   how long such a task recently held its key; 0: unknown
-- least_ms  the least delay if a holder has had the key for longer than usual
--
-- A turn is neither promised nor exclusive. It only spreads the retries, so that callers do not come all at
-- once, or long after the key is free.

local LOCK, QUEUE, TASKS, RETURNS = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local hold_ms, least_ms, most_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local SHORTEST_MS = 10 -- for a hold, including the delivery of the message
local SHARE = 0.5 -- of a hold between two turns: two callers at a time are better than none
local OVERTIME = 0.75 -- a hold that is longer than usual is expected to last this part of its age more
local FEW = 64 -- grants that are read; with more, holds count as longer than usual
local SINCE = '^%d+ %d+ %-?%d+ %a+ %d+ (%d+) ' -- in a grant, as in grants.lua
local KEPT_MS = 60000 -- for which turns are remembered after the last one

-- Returns a field as a number; 0 if another program wrote something else there.
local function number(value)
    local found = tonumber(value or 0) or 0
    return found > 0 and found < 2 ^ 53 and found or 0
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000

-- Returns the age of the youngest shared grant.
local function youngest_age_ms()
    local last = 0
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local since = string.sub(fields[i], 1, 2) == 'g:' and string.match(fields[i + 1], SINCE)
        last = math.max(last, number(since))
    end
    return last > 0 and now_ms - last / 1000 or 0
end

local told = redis.call('HMGET', RETURNS, 'next', 'hold')
local usual_ms = number(told[2])
if hold_ms > 0 then
    usual_ms = usual_ms > 0 and (usual_ms + hold_ms) / 2 or hold_ms
end
local hold = math.max(usual_ms, SHORTEST_MS)
-- The token is the time of the grant. A hold that is longer than usual has an unknown end: the older it is,
-- the later the caller should try again. The same is true of a pause without an end.
local held = redis.call('HMGET', LOCK, 'token', 'x', 'count', 'rest')
local ends_ms, stage = string.match(held[2] or '', '^(%d+) %d+ %-?%d+ (%a)')
local holders, waiting = number(held[3]), redis.call('ZCARD', QUEUE)
local limit = redis.call('HGET', TASKS, 'limit') or ''
local until_ms, set_at = string.match(limit, '^0/?%S* (%d+) (%d+) ')
local is_paused = until_ms == '0'
local since_ms = number(is_paused and set_at or held[1]) / 1000
local age_ms = since_ms > 0 and math.max(0, now_ms - since_ms) or 0
local left_ms = hold - age_ms
local opens_ms = math.max(number(until_ms), number(held[4])) - now_ms
if is_paused then
    left_ms, hold = math.max(OVERTIME * age_ms, least_ms), math.max(hold, age_ms)
elseif opens_ms > 0 then
    left_ms = math.max(left_ms, opens_ms) -- no request is admitted earlier, even after a release
elseif stage == 'z' then
    left_ms = number(ends_ms) - now_ms -- it rests, and is not released earlier
elseif holders > 1 then
    local youngest_ms = holders <= FEW and youngest_age_ms()
    if youngest_ms and youngest_ms <= hold then
        left_ms = hold / holders -- one of several holders ends this often, on average
    else
        left_ms = math.max(OVERTIME * (youngest_ms or 0), least_ms)
    end
    hold = math.max(hold, youngest_ms or 0) / holders
elseif left_ms < 0 or (waiting > 0 and not held[2] and holders == 0) then
    -- Or the key is free, and its first waiter is not admitted yet, because of a rate for example.
    left_ms, hold = math.max(OVERTIME * age_ms, least_ms), math.max(hold, age_ms)
end
local turn_ms = math.max(number(told[1]), now_ms + left_ms + waiting * hold)
local wait_ms = math.ceil(turn_ms - now_ms)
-- A full server refuses these; then retries are not spread.
redis.pcall('HSET', RETURNS, 'hold', string.format('%.0f', usual_ms))
redis.call('PEXPIRE', RETURNS, most_ms + KEPT_MS)
if wait_ms > most_ms then
    return -1
end
redis.pcall('HSET', RETURNS, 'next', string.format('%.0f', turn_ms + SHARE * hold))
return wait_ms
