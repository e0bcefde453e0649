-- times.lua: when time alone lets somebody enter who has to wait now.
-- KEYS lock queue tasks woken fence done rate

-- The end (ms) of the operator's limit; nothing: it has none.
local function end_of_limit()
    local ends = string.match(redis.call('HGET', TASKS, 'limit') or '', '^%S+ (%d+) ')
    return ends and ends ~= '0' and tonumber(ends) or nil
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

-- In how many ms it may change, though nobody gives anything up, that one who waits and is next cannot
-- have what he wants; nothing: that is not for time to do.
local function opens_in(now, member)
    local owner, rest, rests = unpack(redis.call('HMGET', LOCK, 'owner', 'rest', 'rests'))
    if owner and owner ~= SHARED then
        local rests_alone = string.find(owner, 'parked:resting:', 1, true) == 1
        return rests_alone and math.max(0, redis.call('PTTL', LOCK)) + 1 or nil
    end
    local limit, at = limit_at(now), nil
    if limit == 0 then
        at = end_of_limit()
    elseif (tonumber(rest or 0) or 0) > now / 1000 then
        at = tonumber(rest)
    else
        at = rests and first_end_of_rest()
        local ends = limit and end_of_limit()
        at = at and ends and math.min(at, ends) or at or ends
        local units, capacity, terms = want_in(redis.call('HGET', TASKS, 'w:' .. member))
        if terms and fits(units, capacity, now) then
            at = (now + starts_in(terms, now)) / 1000
        end
    end
    return at and math.max(1, math.ceil(at - now / 1000)) or nil
end
