-- lanes.lua: the lanes of a key's queue, which have their turns in proportion to their shares (start-time
-- fair queueing). In a lane, waiters are in the order of the queue.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- tasks  turn: the tag of the last start, while a waiter has asked for a lane. Then each waiter is in a
--        lane: in the lane '' if it has asked for none. While the index lacks earlier waiters, also the
--        place up to which the queue is in it, and the number of waiters at that place that are
-- lanes  zset: an index of the queue. Lanes have no blanks, places 16 digits. What has a higher score comes
--        later by name, too, except for the lanes: so ranges of waiters by name are complete.
--        w<lane> <place><member>, score 0: a waiter; obsolete if that is not its place in the queue
--        x, score 1: it was begun with the first waiter of the queue, and not evicted since
--        y<lane>, score its tag: a lane with waiters; the one with the lowest tag has its turn. Its tag and
--        CAPPED: a lane with as many units as it may have, so that its first waiter has to wait. Its tag and
--        IDLE: one without waiters
-- USES records limits grants
-- TOGETHER read_turn lanes_between entries_of first_in_turn first_of_lane pass_turn
-- TOGETHER first_in_turn read_turn lanes_between entries_of first_of_lane pass_turn
-- TOGETHER enter_lane lane_in place_entry add_waiters

local NEW = 3 -- the tag of a lane that was not known
local BEFORE = 2 -- of one that goes before all others
local CAPPED = 2 ^ 51 -- above all tags
local IDLE = 2 ^ 52
local PLAIN = 1000 -- added to the tag of a lane with share 1 for each unit
local MOST_STALE = 1000 -- obsolete entries that are removed in one step
local STEP = 200 -- waiters that a request adds to the index, while some are missing
local SWEPT = 16 -- one of this many turns removes lanes without waiters whose tags have passed
local MOST_UNCAPPED = 16 -- in one sweep

-- Returns the lane at the end of a want, if it has one.
local function lane_in(text)
    return string.match(text or '', '^[^@]*@%d+:?%d*/(%S*)$')
end

-- Returns the tag of the last start if the waiters are in lanes, else false.
local function last_turn()
    if key.tasks.turn == nil then
        fetch('limit', 'turn')
    end
    return key.tasks.turn and known_number(string.sub(key.tasks.turn, 1, 16))
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
    if type(place) ~= 'string' or #place ~= 16 then
        place = digits(tonumber(place) or 0)
    end
    return 'w' .. lane .. ' ' .. place .. member
end

-- Returns the entries of waiters of a lane, without the first `skipped`.
local function entries_of(lane, skipped, most)
    return redis.call('ZRANGE', LANES, '[w' .. lane .. ' ', '(w' .. lane .. '!', 'BYLEX', 'LIMIT', skipped, most)
end

-- Returns the lanes with scores from one up to another, each followed by its score.
local function lanes_between(from, to, skipped, most)
    return redis.call('ZRANGE', LANES, from, string.format('(%d', to), 'BYSCORE', 'LIMIT', skipped, most, 'WITHSCORES')
end

-- Returns the score of a lane; nothing if it is not known.
local function score_of(lane)
    return tonumber(redis.call('ZSCORE', LANES, 'y' .. lane) or nil)
end

local function set_score(lane, score)
    key.turn = nil
    redis.call('ZADD', LANES, score, 'y' .. lane)
end

-- Adds waiters of a lane to the index, and has the lane take its turns.
local function add_waiters(lane, entries)
    local name, first = 'y' .. lane, entries[2]
    local score = tonumber(redis.call('ZSCORE', LANES, name) or IDLE + NEW)
    if score >= IDLE then
        entries[#entries + 1], entries[#entries + 2] = score - IDLE, name
    end
    key.turn = nil
    redis.call('ZADD', LANES, unpack(entries))
    if score >= CAPPED and score < IDLE and entries_of(lane, 0, 1)[1] == first then
        set_score(lane, score - CAPPED)
    end
end

-- Has a lane take its turns that may have more units, or another first waiter.
local function uncap(lane)
    local score = key.tasks.turn ~= false and last_turn() and score_of(lane)
    if score and score >= CAPPED and score < IDLE then
        set_score(lane, score - CAPPED)
    end
end

-- Passes the lane that has its turn until uncap() is called. Returns whether there is one.
local function cap_turn()
    local turn = key.turn
    if turn then
        set_score(turn.lane, turn.tag + CAPPED)
    end
    return turn ~= nil
end

-- Has some lanes take their turns that are at their most and not paused: their holders may have died all at once.
local function uncap_some()
    local found = lanes_between(CAPPED, IDLE, 0, MOST_UNCAPPED)
    if #found == 2 * MOST_UNCAPPED then
        local many = redis.call('ZCOUNT', LANES, CAPPED, string.format('(%d', IDLE))
        found = lanes_between(CAPPED, IDLE, math.floor(now) % many, MOST_UNCAPPED)
    end
    for i = 1, #found, 2 do
        local lane = string.sub(found[i], 2)
        local limit = lane_limits()[lane]
        if not (limit and limit.capacity == 0) then
            set_score(lane, found[i + 1] - CAPPED)
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
    local members, by_lane = {}, {}
    for i = 1, #found, 2 do
        members[#members + 1] = found[i]
    end
    for number, lane in ipairs(members[1] and lanes_of(members) or {}) do
        local entries = by_lane[lane] or {}
        entries[#entries + 1], entries[#entries + 2] = 0, place_entry(lane, found[2 * number], members[number])
        by_lane[lane] = entries
    end
    for lane, entries in pairs(by_lane) do
        add_waiters(lane, entries)
    end
    if from == '0' then
        redis.call('ZADD', LANES, 1, 'x')
    end
    local to = #members == STEP and integer(found[#found])
    note_turn(last_turn(), to and to .. ' ' .. (to == from and skipped + STEP or 0) or nil)
end

local function enter_lane(member, place, want_text)
    local lane = lane_in(want_text)
    if key.tasks.turn == nil then
        fetch('limit', 'turn')
    end
    if not key.tasks.turn then
        if not lane then
            return
        end
        redis.call('DEL', LANES) -- a script was interrupted
        key.tasks.turn, key.has_indexed = digits(BEFORE) .. ' 0 0', nil
    end
    if #key.tasks.turn > 16 then
        index_some()
    end
    add_waiters(lane or '', { 0, place_entry(lane or '', place, member) })
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

local function leave_lane(member, place, lane)
    redis.call('ZREM', LANES, place_entry(lane or '', place, member))
    if key.turn and key.turn.entries then
        key.turn = nil
    end
    if lane and not (key.turn and key.turn.lane == lane) then
        uncap(lane)
    end
end

-- Removes a waiter from the queue, then from its lane. Returns whether it was there.
local function dequeue(member, place, want_text)
    if key.head and key.head[1] == member then
        key.head = nil
    end
    local was_there = redis.call('ZREM', QUEUE, member) == 1
    if key.tasks.turn then
        local turn = key.turn
        if turn and turn.member == member then
            redis.call('ZREM', LANES, turn.entry)
            turn.member = nil
        else
            leave_lane(member, place, lane_in(want_text))
        end
    end
    return was_there
end

-- Adds a waiter that is served before those of all lanes, as it has had its turn.
local function enter_first(member, place, want_text)
    local lane = lane_in(want_text) or ''
    key.turn = nil
    redis.call('ZADD', LANES, 0, place_entry(lane, place, member), BEFORE, 'y' .. lane)
end

-- Returns the first waiter of a lane, its place, its entry, and whether there may be more. Without a waiter,
-- there may be one behind many obsolete entries. `found` are the first two entries, if they were read.
local function first_of_lane(lane, only_looks, found)
    for number = 0, MOST_STALE do
        found = found or entries_of(lane, only_looks and number or 0, 2)
        local entry, has_more = found[1], found[2] ~= nil
        if not entry then
            return nil
        end
        local place, member = string.sub(entry, #lane + 3, #lane + 18), string.sub(entry, #lane + 19)
        local run = string.sub(member, 1, 2) == 'p:' and string.sub(member, 3)
        if run and not only_looks and key.tasks['e:' .. run] == nil then
            fetch('r:' .. run, 'e:' .. run)
        end
        local of = run and record(run)
        local score = of and of.s == 'waiting' and of.p == place and place or redis.call('ZSCORE', QUEUE, member)
        if score and (score == place or digits(tonumber(score)) == place) then
            return member, score, entry, has_more
        elseif not only_looks then
            redis.call('ZREM', LANES, entry)
        end
        found = nil
    end
    return nil, nil, nil, true
end

local function index_again()
    note_turn(last_turn(), '0 0')
    key.has_indexed = nil
    index_some()
end

-- Reads which lane has its turn, or a later one, and its first two entries. Returns false if the server has
-- evicted the index; nothing if there is no such lane.
local function read_turn(skipped)
    local found = lanes_between(1, CAPPED, skipped, 2)
    local lane = found[3] and string.sub(found[3], 2)
    if skipped == 0 and found[1] ~= 'x' then
        return false
    end
    return lane and { lane = lane, tag = tonumber(found[4]), entries = entries_of(lane, 0, 2) }
end

-- Returns the first waiter of the lane that has its turn, and its place; nothing if there is none. With
-- `only_looks` it changes nothing.
local function first_in_turn(only_looks)
    if not only_looks then
        if #key.tasks.turn > 16 then
            index_some()
        end
        if not key.token then
            uncap_some()
        end
        if key.turn and key.turn.member then
            return key.turn.member, key.turn.place
        end
    end
    for number = 0, MOST_STALE do
        local turn = key.turn and key.turn.entries and key.turn or read_turn(only_looks and number or 0)
        if turn == false and not only_looks then
            index_again()
            turn = read_turn(0)
        end
        if not turn then
            break
        end
        key.turn = turn
        turn.member, turn.place, turn.entry, turn.has_more = first_of_lane(turn.lane, only_looks, turn.entries)
        turn.entries = nil
        if turn.member then
            return turn.member, turn.place
        elseif not (only_looks or turn.has_more) then
            set_score(turn.lane, turn.tag + IDLE)
        end
    end
    key.turn = nil
end

-- Forgets the lanes of a queue without waiters.
local function end_lanes()
    if redis.call('EXISTS', QUEUE) == 0 then
        redis.call('HDEL', TASKS, 'turn')
        redis.call('DEL', LANES)
        key.tasks.turn, key.turn = false, nil
    end
end

-- Counts the start of a waiter, so that the other lanes have their turns. With `has_left` it has left the
-- queue, and its lane is without waiters if it was the last one: not earlier, as a script may be interrupted.
local function pass_turn(want, has_left)
    local lane, share, units = want.lane or '', want.share or PLAIN, want.capacity == 1 and 1 or needed(want)
    local last, turn, tag, kind = known_number(string.sub(key.tasks.turn, 1, 16)), key.turn, nil, nil
    if turn and turn.lane == lane and not turn.entries then
        tag, kind = turn.tag, has_left and not turn.has_more and IDLE or 0
    else
        local score = score_of(lane) or last
        kind = score >= IDLE and IDLE or score >= CAPPED and CAPPED or 0
        turn, tag = nil, score - kind
    end
    tag = math.max(last, tag) -- a lane that had no waiters does not make up for that time
    key.turn = nil
    local next_tag = math.min(tag + math.ceil(units * PLAIN * PLAIN / math.max(1, share)), CAPPED - 1)
    redis.call('ZADD', LANES, kind + next_tag, 'y' .. lane)
    if turn and tag > last then
        note_turn(tag, indexed_to())
    end
    if now % SWEPT < 1 then
        local to = string.format('(%d', IDLE + tag)
        local idle = redis.call('ZRANGE', LANES, IDLE, to, 'BYSCORE', 'LIMIT', 0, 2 * SWEPT)
        if idle[1] then
            redis.call('ZREM', LANES, unpack(idle))
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
