-- limits.lua: an operator's limits: that of a key, which replaces the capacity and rates of requests, and
-- those of its lanes, which replace their `most`.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- tasks  limit: a line for each; the key's is the first. That of a lane begins with @, the lane and a blank.
--        Units (-: as requested), optionally followed by / and rates (rates.lua); its end (ms; 0: none), the
--        time when it was set (µs), and the operator
-- USES records lanes

-- Returns the lane of a written limit, if it is that of a lane; and its capacity, rates and end (ms), each if
-- set.
local function read_limit(line)
    local lane, terms = string.match(line, '^@(%S+) (.*)$')
    local head, ends = string.match(terms or line, '^(%S+) (%d+) ')
    local capacity, rates = string.match(head or '', '^([%d-]+)/?(.*)$') -- apart: see taken_by
    if not capacity then
        return lane, nil
    end
    ends = ends ~= '0' and tonumber(ends) or nil
    return lane, { capacity = tonumber(capacity), rates = rates ~= '' and rates or nil, ends = ends }
end

local function write_limits(lines, call)
    key.tasks.limit = lines[1] and table.concat(lines, '\n') or false
    if lines[1] then
        call('HSET', TASKS, 'limit', key.tasks.limit)
    else
        redis.call('HDEL', TASKS, 'limit')
    end
end

-- Reads the limits. Removes those that have ended.
local function read_limits()
    if key.tasks.limit == nil then
        fetch('limit', 'turn')
    end
    local found, left, has_ended = { key = {}, lanes = {} }, {}, false
    for line in string.gmatch(key.tasks.limit or '', '[^\n]+') do
        local lane, limit = read_limit(line)
        local ends = limit and limit.ends
        if ends and ends <= now_ms then
            has_ended = true
            if lane then
                uncap(lane)
            end
        elseif limit then
            left[#left + 1] = line
            if lane then
                found.lanes[lane] = limit
            else
                found.key = limit
            end
        end
    end
    if has_ended then
        write_limits(left, redis.pcall) -- a full server may refuse it
    end
    return found
end

-- Returns the operator's limit of the key: capacity, rates and end (ms), each if set.
local function limit_now()
    key.limits = key.limits or read_limits()
    return key.limits.key
end

-- Returns those of its lanes, by lane.
local function lane_limits()
    key.limits = key.limits or read_limits()
    return key.limits.lanes
end
