-- list_lanes.lua: list the lanes of a key's queue that have waiters, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV limit
-- returns as JSON lanes: at most `limit`, in the order of their turns, then those that have as many units as
--         they may; of each its name, the number of its waiters, the units of its grants that note it, and
--         the want of the first waiter (gates.lua), if known
-- USES records grants limits rates gates runs answers queue

local limit, found = tonumber(ARGV[1]), {}

-- Adds lanes whose marks are of this kind.
local function add(kind, next_kind)
    for _, mark in ipairs(between(kind, next_kind, 0, limit - #found)) do
        local name = string.match(mark, '^%a%d+ (.*)$') or ''
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
add('t', 'u')
if #found < limit then
    add('c', 'd')
end
return named({ lanes = found })
