-- lanes.lua: the lanes of a key's queue, which have their turns in proportion to their shares (start-time
-- fair queueing). In a lane, waiters are in the order of the queue.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- tasks  turn: the tag of the last start, while a waiter has asked for a lane. Then each waiter is in a
--        lane: in the lane '' if it has asked for none. While the index lacks earlier waiters, also the
--        place up to which the queue is in it, and the number of waiters at that place that are
-- lanes  zset, all with score 0: an index of the queue. Lanes have no blanks, tags and places 16 digits.
--        s: it was begun with the first waiter of the queue, and not evicted since
--        w<lane> <place><member>: a waiter; obsolete if that is not its place in the queue
--        t<tag> <lane>: a lane with waiters; the one with the lowest tag has its turn. i<tag> <lane>: a
--        lane without waiters. c<tag> <lane>: one whose first waiter has to wait because the lane has as
--        many units as it may
--        l<lane> <mark>: the mark of a lane: t, i or c, and its tag
-- USES records limits grants

local PLAIN = 1000 -- added to the tag of a lane with share 1 for each unit
local MOST_STALE = 1000 -- obsolete entries that are removed in one step
local STEP = 200 -- waiters that a request adds to the index, while some are missing
local SWEPT = 16 -- one of this many turns removes lanes without waiters whose tags have passed
local MOST_UNCAPPED = 16 -- in one sweep

-- Returns the lane at the end of a want, after an @, its share (in thousandths), and the most units that it
-- may have; nothing if there is none.
local function lane_in(text)
    local share, most, lane = string.match(text or '', '^[^@]*@(%d+):?(%d*)/(%S*)$')
    return lane, tonumber(share), tonumber(most)
end

-- Returns the tag of the last start if the waiters are in lanes, else false.
local function last_turn()
    if key.tasks.turn == nil then
        fetch('limit', 'turn')
    end
    return key.tasks.turn and known_number(string.match(key.tasks.turn, '^%d+'))
end

local function digits(number)
    return string.format('%016.0f', math.max(0, math.min(number, EXACT)))
end

-- Notes the tag of the last start, and up to where waiters are in the index: nothing if all are.
local function note_turn(tag, indexed)
    key.tasks.turn = digits(tag) .. (indexed and ' ' .. indexed or '')
    redis.call('HSET', TASKS, 'turn', key.tasks.turn)
end

-- Returns up to where waiters are in the index; nothing if all are.
local function indexed_to()
    return string.match(key.tasks.turn or '', '^%d+ (%d+ %d+)$')
end

local function place_entry(lane, place, member)
    return 'w' .. lane .. ' ' .. digits(tonumber(place) or 0) .. member
end

-- Returns entries of the index, from one text up to another, without the first `skipped`.
local function between(from, to, skipped, most)
    return redis.call('ZRANGE', LANES, '[' .. from, '(' .. to, 'BYLEX', 'LIMIT', skipped, most)
end

-- Returns a lane's mark; nothing if it has none.
local function mark_of(lane)
    local found = between('l' .. lane .. ' ', 'l' .. lane .. '!', 0, 2)
    local old, mark = string.sub(found[1] or '', #lane + 3), string.sub(found[2] or '', #lane + 3)
    if mark == '' then
        return old ~= '' and old or nil
    end
    redis.call('ZREM', LANES, found[1], old .. ' ' .. lane) -- a script was interrupted
    return mark
end

local function mark_lane(lane, before, mark)
    redis.call('ZADD', LANES, 0, 'l' .. lane .. ' ' .. mark, 0, mark .. ' ' .. lane)
    if before and before ~= mark then
        redis.call('ZREM', LANES, before .. ' ' .. lane, 'l' .. lane .. ' ' .. before)
    end
end

-- Has a lane take its turns that has a new waiter with this entry.
local function open_lane(lane, entry)
    local before = mark_of(lane)
    if not before then
        mark_lane(lane, nil, 't' .. digits(1)) -- 0: see enter_first()
        return
    end
    local kind = string.sub(before, 1, 1)
    if kind == 'i' or (kind == 'c' and between('w' .. lane .. ' ', 'w' .. lane .. '!', 0, 1)[1] == entry) then
        mark_lane(lane, before, 't' .. string.sub(before, 2))
    end
end

-- Has a lane take its turns that may have more units, or another first waiter.
local function uncap(lane)
    local before = key.tasks.turn ~= false and last_turn() and mark_of(lane)
    if before and string.sub(before, 1, 1) == 'c' then
        mark_lane(lane, before, 't' .. string.sub(before, 2))
    end
end

-- Passes the lane that has its turn until uncap() is called. Returns whether there is one.
local function cap_turn()
    local turn = key.turn
    if turn then
        mark_lane(turn.lane, turn.mark, 'c' .. string.sub(turn.mark, 2))
    end
    key.turn = nil
    return turn ~= nil
end

-- Has some lanes take their turns that are at their most and not paused: their holders may have died all at once.
local function uncap_some()
    local found = between('c', 'd', 0, MOST_UNCAPPED)
    if #found == MOST_UNCAPPED then
        found = between('c', 'd', math.floor(now) % redis.call('ZLEXCOUNT', LANES, '[c', '(d'), MOST_UNCAPPED)
    end
    for _, entry in ipairs(found) do
        local mark, lane = string.match(entry, '^(c%d+) (.*)$')
        local limit = mark and lane_limits()[lane]
        if mark and not (limit and limit.capacity == 0) then
            mark_lane(lane, mark, 't' .. string.sub(mark, 2))
        end
    end
end

-- Returns the lane of each of some waiters.
local function lanes_of(members)
    local names, lanes = {}, {}
    for number, member in ipairs(members) do
        names[number] = string.sub(member, 1, 2) == 'p:' and 'r:' .. string.sub(member, 3) or 'w:' .. member
    end
    for number, text in ipairs(redis.call('HMGET', TASKS, unpack(names))) do
        local is_in_lane, is_read, of = text and string.find(text, '@', 1, true), true, { w = text }
        if is_in_lane and string.sub(names[number], 1, 2) == 'r:' then
            is_read, of = pcall(cjson.decode, text)
        end
        lanes[number] = is_in_lane and is_read and type(of) == 'table' and lane_in(of.w) or ''
    end
    return lanes
end

-- Adds some of the missing waiters to the index, the first of the queue first: more than one request serves.
local function index_some()
    local from, skipped = string.match(indexed_to() or '', '^(%d+) (%d+)$')
    if not from or key.has_indexed then
        return
    end
    key.has_indexed = true
    local found = redis.call('ZRANGE', QUEUE, from, '+inf', 'BYSCORE', 'LIMIT', skipped, STEP, 'WITHSCORES')
    local members, added, seen = {}, from == '0' and { 0, 's' } or {}, {}
    for i = 1, #found, 2 do
        members[#members + 1] = found[i]
    end
    for number, lane in ipairs(members[1] and lanes_of(members) or {}) do
        local entry = place_entry(lane, found[2 * number], members[number])
        added[#added + 1], added[#added + 2], seen[lane] = 0, entry, seen[lane] or entry
    end
    if added[1] then
        redis.call('ZADD', LANES, unpack(added))
    end
    for lane, entry in pairs(seen) do
        open_lane(lane, entry)
    end
    local to = #members == STEP and integer(found[#found])
    note_turn(last_turn(), to and to .. ' ' .. (to == from and skipped + STEP or 0) or nil)
end

local function enter_lane(member, place, want_text)
    local lane = lane_in(want_text)
    if not last_turn() then
        if not lane then
            return
        end
        redis.call('DEL', LANES) -- a script was interrupted
        key.tasks.turn, key.has_indexed = digits(0) .. ' 0 0', nil
    end
    index_some()
    local entry = place_entry(lane or '', place, member)
    redis.call('ZADD', LANES, 0, entry)
    open_lane(lane or '', entry)
end

-- Adds a waiter to the queue; before that, to its lane: then an interrupted script leaves an obsolete entry,
-- and no waiter without one. Returns whether it is new.
local function enqueue(member, place, want_text)
    key.head = nil
    if key.tasks.turn ~= false or string.find(want_text or '', '@', 1, true) then
        enter_lane(member, place, want_text)
    end
    return redis.call('ZADD', QUEUE, 'NX', place, member) == 1
end

-- Removes a waiter from the queue, then from its lane. Returns whether it was there.
local function dequeue(member, place, want_text)
    if key.head and key.head[1] == member then
        key.head = nil
    end
    local was_there = redis.call('ZREM', QUEUE, member) == 1
    if key.tasks.turn then
        local lane = lane_in(want_text)
        redis.call('ZREM', LANES, place_entry(lane or '', place, member))
        if lane and not (key.turn and key.turn.lane == lane) then
            uncap(lane)
        end
    end
    return was_there
end

-- Adds a waiter that is served before those of all lanes, as it has had its turn.
local function enter_first(member, place, want_text)
    local lane = lane_in(want_text) or ''
    redis.call('ZADD', LANES, 0, place_entry(lane, place, member))
    mark_lane(lane, mark_of(lane), 't' .. digits(0))
end

-- Returns the first waiter of a lane, its place, and whether there may be more. Without a waiter, there may
-- be one behind many obsolete entries.
local function first_of_lane(lane, only_looks)
    local before = 'w' .. lane .. ' '
    for number = 0, MOST_STALE do
        local found = between(before, 'w' .. lane .. '!', only_looks and number or 0, 2)
        if not found[1] then
            return nil
        end
        local place = string.sub(found[1], #before + 1, #before + 16)
        local member = string.sub(found[1], #before + 17)
        local stands = redis.call('ZSCORE', QUEUE, member)
        if stands and digits(tonumber(stands)) == place then
            return member, stands, found[2] ~= nil
        elseif not only_looks then
            redis.call('ZREM', LANES, found[1])
        end
    end
    return nil, nil, true
end

local function index_again()
    note_turn(last_turn(), '0 0')
    key.has_indexed = nil
    index_some()
end

-- Returns the first waiter of the lane that has its turn, and its place; nothing if there is none. With
-- `only_looks` it changes nothing.
local function first_in_turn(only_looks)
    if not only_looks then
        index_some()
    end
    if not (only_looks or key.token) then
        uncap_some()
    end
    for number = 0, MOST_STALE do
        local found = between('s', 'u', only_looks and number or 0, 2) -- s sorts before all t
        if found[1] ~= 's' and not only_looks then -- the server has evicted the index
            index_again()
            found = between('s', 'u', 0, 2)
        end
        local mark, lane = string.match(found[2] or '', '^(t%d+) (.*)$')
        if not mark then
            break
        end
        local member, place, has_more = first_of_lane(lane, only_looks)
        if member then
            key.turn = { lane = lane, mark = mark, has_more = has_more }
            return member, place
        elseif not (only_looks or has_more) then
            mark_lane(lane, mark, 'i' .. string.sub(mark, 2))
        end
    end
end

-- Forgets the lanes of a queue without waiters.
local function end_lanes()
    if redis.call('EXISTS', QUEUE) == 0 then
        redis.call('HDEL', TASKS, 'turn')
        redis.call('DEL', LANES)
        key.tasks.turn = false
    end
end

-- Counts the start of a waiter, so that the other lanes have their turns. With `has_left` it has left the
-- queue, and its lane is without waiters if it was the last one: not earlier, as a script may be interrupted.
local function pass_turn(want, has_left)
    local last = last_turn()
    if not last then
        return
    end
    local lane, share = want.lane or '', math.max(1, want.share or PLAIN)
    local turn = key.turn and key.turn.lane == lane and key.turn
    local before = turn and turn.mark or mark_of(lane) or 't' .. digits(last)
    -- A lane that had no waiters does not make up for that time.
    local tag, kind = math.max(last, known_number(string.sub(before, 2))), string.sub(before, 1, 1)
    kind = has_left and turn and not turn.has_more and 'i' or kind
    mark_lane(lane, before, kind .. digits(tag + math.ceil(needed(want) * PLAIN * PLAIN / share)))
    key.turn = nil
    if turn and tag > last then
        note_turn(tag, indexed_to())
    end
    if math.floor(now) % SWEPT == 0 then
        for _, entry in ipairs(between('i', 'i' .. digits(tag), 0, 2 * SWEPT)) do
            local mark, idle = string.match(entry, '^(i%d+) (.*)$')
            redis.call('ZREM', LANES, entry, 'l' .. (idle or '') .. ' ' .. (mark or ''))
        end
    end
end

-- Forgets the lanes if the last waiter has left: its process may die before it releases the key.
local function mend_lanes()
    if last_turn() then
        end_lanes()
        uncap_some()
    end
end
