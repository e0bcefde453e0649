-- list_lanes.lua: list the lanes of a key's queue that have waiters, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV limit
-- returns as JSON lanes: at most `limit`, in the order of their turns, then those that have as many units as
--         they may; of each its name, the number of its waiters, the units of its grants that note it, and
--         the want of the first waiter (gates.lua), if known
-- USES records grants limits rates gates runs answers queue

local limit, found = tonumber(ARGV[1]), {}

-- Adds lanes with these scores.
local function add(from, to)
    local lanes = lanes_between(from, to, 0, limit - #found)
    for i = 1, #lanes, 2 do
        local name = string.sub(lanes[i], 2)
        local first = first_of_lane(name, true)
        if first then
            local before = '[w' .. name
            local waiting = redis.call('ZLEXCOUNT', LANES, before .. ' ', before .. '!')
            local used = lane_used(noted_as(name))
            found[#found + 1] = { name = name, waiting = waiting, used = used, want = want_of(first).text }
        end
    end
end

read_clock()
load('', '')
add(BEFORE, CAPPED)
if #found < limit then
    add(CAPPED, IDLE)
end
return named({ lanes = found })
