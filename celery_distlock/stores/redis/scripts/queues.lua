-- queues.lua: count the runs of a key by the destination of their messages, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes later
-- ARGV most
-- returns as JSON waiting, woken and later, each with the number of runs by destination; empty: a blocked
--         waiter, or one whose destination is not known
--
-- most  how many of each are read. If there are more, those that are read are evenly spread over all
-- USES records grants runs

local LATER, MOST = KEYS[9], tonumber(ARGV[1])

-- Returns members of a set that has `many`, which `read` reads by position; of many, some.
local function some_of(many, read)
    if many <= MOST then
        return read(0, -1)
    end
    local found = {}
    for number = 1, MOST do
        local at = math.floor((number - 1) * (many - 1) / (MOST - 1))
        found[number] = read(at, at)[1]
    end
    return found
end

-- Counts members by destination; with a state, only runs in it.
local function count(members, state)
    local counts, names, runs = {}, {}, {}
    for number, member in ipairs(members) do
        runs[number] = string.match(member, state and '^(.*)$' or '^p:(.*)$') or ''
        names[number] = 'r:' .. runs[number]
    end
    if names[1] then
        fetch(unpack(names))
    end
    for _, run in ipairs(runs) do
        local of = run ~= '' and record(run) or nil
        if not state or (of and of.s == state) then
            local destination = of and (of.o or of.q) or ''
            counts[destination] = (counts[destination] or 0) + 1
        end
    end
    return counts
end

local waiting = some_of(redis.call('ZCARD', QUEUE), function(first, last)
    return redis.call('ZRANGE', QUEUE, first, last)
end)
local woken = some_of(redis.call('ZCARD', WOKEN), function(first, last)
    return redis.call('ZRANGE', WOKEN, first, last)
end)
local later = some_of(redis.call('ZCARD', LATER), function(first, last)
    return redis.call('ZRANGE', LATER, first, last)
end)
return cjson.encode({ waiting = count(waiting), woken = count(woken, 'woken'), later = count(later, 'later') })
