-- limits.lua: what an operator has set for a key, which goes before what is asked with.
-- KEYS lock queue tasks woken fence done rate
--
-- tasks  limit: how many units (-: as many as are asked with), perhaps with / and rates after it, as
--        rates.lua has them; its end (ms; 0: none), when it was set (µs), and by whom

local no_tasks = false -- and so no limit
local NO_LIMIT = {}
local last_limit = NO_LIMIT -- of the key whose records these are, once it was read

local function read_limit(now)
    local written = redis.call('HGET', TASKS, 'limit')
    local head, ends = string.match(written or '', '^(%S+) (%d+) ')
    local capacity, rates = string.match(head or '', '^([%d-]+)/?(.*)$') -- apart: see taken_by
    if not capacity then
        return {}
    end
    ends = ends ~= '0' and tonumber(ends) or nil
    if ends and ends <= now / 1000 then
        redis.call('HDEL', TASKS, 'limit')
        return {}
    end
    return { capacity = tonumber(capacity), rates = rates ~= '' and rates or nil, ends = ends }
end

-- The operator's limit: its capacity, its rates and its end (ms), as far as it has them.
local function limit_at(now)
    if no_tasks then
        return NO_LIMIT
    end
    if last_limit.of ~= TASKS then
        last_limit = read_limit(now)
        last_limit.of = TASKS
    end
    return last_limit
end
