-- limits.lua: an operator's limit for a key, which replaces the capacity and rates of requests.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- tasks  limit: units (-: as requested), optionally followed by / and rates (rates.lua); its end (ms; 0:
--        none), the time when it was set (µs), and the operator
-- USES records

local function read_limit()
    if key.tasks.limit == nil then
        fetch('limit', 'turn')
    end
    local written = key.tasks.limit
    if not written then
        return {}
    end
    local head, ends = string.match(written, '^(%S+) (%d+) ')
    local capacity, rates = string.match(head or '', '^([%d-]+)/?(.*)$') -- apart: see taken_by
    if not capacity then
        return {}
    end
    ends = ends ~= '0' and tonumber(ends) or nil
    if ends and ends <= now_ms then
        redis.call('HDEL', TASKS, 'limit')
        return {}
    end
    return { capacity = tonumber(capacity), rates = rates ~= '' and rates or nil, ends = ends }
end

-- Returns the operator's limit: capacity, rates and end (ms), each if set.
local function limit_now()
    if not key.limit then
        key.limit = read_limit()
    end
    return key.limit
end
