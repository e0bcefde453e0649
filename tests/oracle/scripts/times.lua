-- times.lua: when time alone lets somebody enter who has to wait now.
-- KEYS lock queue tasks woken fence done rate

local MOST_PASSED = 10 -- of those who wait, who have their part already

-- The first who waits and has no part of the key yet, unless it stands far behind.
local function first_in_line()
    for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, MOST_PASSED)) do
        local run = string.match(member, '^p:(.*)$')
        if not (run and redis.call('HEXISTS', TASKS, 'k:' .. run) == 1 and keeps_for(run)) then
            return member
        end
    end
end

-- The end (ms) of the first rest of a part of the key.
local function first_end_of_rest()
    local first
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local share = string.find(fields[i], 'h:parked:resting:', 1, true) == 1 and read(fields[i + 1])
        if share then
            first = math.min(first or share.ends, share.ends)
        end
    end
    return first
end

-- In how many ms rates let so much in that is free; or the end of an operator's, if that is sooner;
-- nothing: it is not for them to do.
local function opens_by_rate(now, units, capacity, terms)
    terms = in_force(terms, now)
    if not (terms and fits(units, capacity, now)) then
        return nil
    end
    local limit, wait_ms = limit_at(now), starts_by(terms, now) / 1000
    if limit.rates and limit.ends then
        wait_ms = math.min(wait_ms, limit.ends - now / 1000)
    end
    return math.max(1, math.ceil(wait_ms))
end

-- In how many ms it may change, though nobody gives anything up, that one who waits and is next cannot
-- have what he wants; nothing: that is not for time to do.
local function opens_in(now, member)
    local owner, rest, rests = unpack(redis.call('HMGET', LOCK, 'owner', 'rest', 'rests'))
    if owner and owner ~= SHARED then
        local rests_alone = string.find(owner, 'parked:resting:', 1, true) == 1
        return rests_alone and math.max(0, redis.call('PTTL', LOCK)) + 1 or nil
    end
    local limit, at = limit_at(now), nil
    if limit.capacity == 0 then
        at = limit.ends
    elseif (tonumber(rest or 0) or 0) > now / 1000 then
        at = tonumber(rest)
    else
        local units, capacity, terms = want_in(redis.call('HGET', TASKS, 'w:' .. member))
        local by_rate_ms = opens_by_rate(now, units, capacity, terms)
        if by_rate_ms then
            return by_rate_ms
        end
        at = rests and first_end_of_rest()
        local ends = limit.ends
        at = at and ends and math.min(at, ends) or at or ends
    end
    return at and math.max(1, math.ceil(at - now / 1000)) or nil
end
