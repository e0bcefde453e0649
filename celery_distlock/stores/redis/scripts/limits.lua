-- limits.lua: what an operator has set for a key, which goes before what is asked with.
-- KEYS lock queue tasks woken fence done rate
--
-- tasks  limit: how many units (-: as many as are asked with), perhaps with / and rates after it, as
--        rates.lua has them; its end (ms; 0: none), when it was set (µs), and by whom
-- USES records

local NO_LIMIT = {}

local function read_limit()
    local written = field('limit')
    if not written then
        return NO_LIMIT
    end
    local head, ends = string.match(written, '^(%S+) (%d+) ')
    local capacity, rates = string.match(head or '', '^([%d-]+)/?(.*)$') -- apart: see taken_by
    if not capacity then
        return NO_LIMIT
    end
    ends = ends ~= '0' and tonumber(ends) or nil
    if ends and ends <= now_ms then
        redis.call('HDEL', TASKS, 'limit')
        return NO_LIMIT
    end
    return { capacity = tonumber(capacity), rates = rates ~= '' and rates or nil, ends = ends }
end

-- The operator's limit: its capacity, its rates and its end (ms), as far as it has them.
local function limit_now()
    if not key.limit then
        key.limit = read_limit()
    end
    return key.limit
end
