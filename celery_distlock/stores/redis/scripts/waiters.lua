-- waiters.lua: list the waiters of a key and its runs in flight, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes leaving
-- ARGV first last [lane]
-- returns as JSON woken: the runs in flight, and queue: the waiters, each from position first to last; of
--         each its run, or as `blocked` inbox and owner; since (µs); task, the name of a parked run's task,
--         if known; its want (gates.lua); and leaves_ms until it leaves the queue, if that is noted
--
-- lane    those of this lane only; positions count in it. Empty: those that have asked for none
-- USES records grants runs lanes

local LEAVING = KEYS[9]
local first, last, lane = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local found = { woken = {}, queue = {} }

local function is_in_lane(want)
    return not lane or (lane_in(want) or '') == lane
end

-- Returns the members of the queue, and their places.
local function queued()
    if not lane or (lane == '' and not last_turn()) then
        local members, places = {}, {}
        for number, word in ipairs(redis.call('ZRANGE', QUEUE, first, last, 'WITHSCORES')) do
            local list = number % 2 == 1 and members or places
            list[#list + 1] = word
        end
        return members, places
    end
    local members = {}
    for number, entry in ipairs(entries_of(lane, first, last - first + 1)) do
        members[number] = string.sub(entry, #lane + 19)
    end
    return members, members[1] and redis.call('ZMSCORE', QUEUE, unpack(members)) or {}
end

local function add(list, run, member, since, leaves)
    local of = run and record(run) or {}
    local blocked, want = not run and string.match(member, '^b:(.*)$'), of.w or (not run and field('w:' .. member))
    local leaves_ms = leaves and math.min(EXACT, math.max(0, math.ceil(known_number(leaves) - now_ms))) or nil
    list[#list + 1] =
        { run = run, blocked = blocked, since = since or of.p, task = of.t, want = want, leaves_ms = leaves_ms }
end

local function add_woken()
    local number = 0
    for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, last + math.max(key.count, 1))) do -- some hold the key
        local of = record(run)
        if number <= last and not held_by(run) and is_in_lane(of and of.w) then
            if number >= first then
                add(found.woken, run)
            end
            number = number + 1
        end
    end
end

local function add_queued()
    local members, places = queued()
    local runs, fields, seen = {}, {}, {}
    for number, member in ipairs(members) do
        runs[number] = string.match(member, '^p:(.*)$') or ''
        fields[number] = runs[number] ~= '' and 'r:' .. runs[number] or 'w:' .. member
    end
    if not members[1] then
        return
    end
    fetch(unpack(fields))
    local leaving = redis.call('ZMSCORE', LEAVING, unpack(runs))
    for number, member in ipairs(members) do
        if places[number] and not seen[member] then -- else its entry in the lane is obsolete
            local run = runs[number] ~= '' and runs[number] or nil
            add(found.queue, run, member, places[number], leaving[number])
            seen[member] = true
        end
    end
end

read_clock()
load('', '')
add_woken()
add_queued()
return named(found)
