-- list_lanes.lua: list the lanes of a key's queue that have waiters, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV limit
-- returns as JSON lanes: at most `limit`, in the order of their turns; of each its name, the number of its
--         waiters, and the want of the first (gates.lua), if known
-- USES records grants limits rates gates runs answers queue

local found = {}
for _, turn in ipairs(between('t', 'u', 0, tonumber(ARGV[1]))) do
    local name = string.match(turn, '^t%d+ (.*)$') or ''
    local first = first_of_lane(name, true)
    if first then
        local before = '[w' .. name
        local waiting = redis.call('ZLEXCOUNT', LANES, before .. ' ', before .. '!')
        found[#found + 1] = { name = name, waiting = waiting, want = want_of(first).text }
    end
end
return named({ lanes = found })
