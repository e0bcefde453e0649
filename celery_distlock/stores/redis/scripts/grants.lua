-- grants.lua: the holders of a key. Each holder has one grant. A grant contains its own end, so no
-- other record has to be right.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- lock   token: of the exclusive grant, or of all shared grants since the key was last free;
--        rest: no request is admitted before this time (ms).
--        x: the exclusive grant; was: its units, slot and capacity before an upgrade.
--        Shared grants: g:<owner> the grant; o:<run> the owner with which a run holds the key;
--        t:<task> the task's attempt that was granted last, while it holds the key;
--        count: number of grants; used: units; next: no grant ends before this time (ms); slots: 0 or 1
--        for each unit that has a number; last: the owner of the last grant; capacity: of the last
--        request; late: the latest arrival (µs) among unclaimed reservations; rests: some units rest;
--        kept: the run for which units are kept; up: inbox and owner of a holder that waits for its
--        upgrade; scan: cursor of the scan through many grants.
--        start:<owner>: see rates.lua. m:<lane>: units of the grants that note a lane, as they note it.
--
-- A grant is one line: end (ms), units (0: exclusive), slot (-1: none), stage and flags, arrival (µs) if it
-- was reserved (else 0), time of the grant (µs), length of the owner, owner, run.
-- USES records limits rates lanes

local FEW = 64 -- grants that are read at once
local MANY = 256 -- grants that one step of a scan reads
local LOOK_MS = 1000 -- until a closed key is checked again
local AGAIN_MS = 5000 -- until many grants are scanned again
local MOST_SLOTS = 1024

-- Stages of a grant.
local HELD = 'h'
local RESERVED = 'r'
local KEPT = 'k'
local RESTING = 'z'
-- Flags, after the stage.
local AGAIN = 'a' -- another message of its run is in flight
local STARTS = 's' -- a start is reserved for it
local LANED = 'l' -- it was exclusive, for a request with a lane
local LANE = 'Z' -- then the lane of a shared grant, two hexadecimal digits for each byte
local IN_LANE = '[lZ]' -- LANED or LANE
local RECALLED = 'c' -- its holder is asked to leave; then `n` if by a newer call, and when (µs)

local function reserved_owner(run)
    return 'parked:' .. run
end

local function read_grant(row)
    if not row then
        return nil
    end
    local ends, units, slot, stage, flags, place, since, length, rest =
        string.match(row, '^(%d+) (%d+) (%-?%d+) (%a)(%w*) (%d+) (%d+) (%d+) (.*)$')
    if not ends then
        return nil -- written by another program
    end
    ends, units, slot, length = tonumber(ends), tonumber(units), tonumber(slot), tonumber(length)
    place = place == '0' and 0 or tonumber(place)
    return {
        ends = ends < EXACT and ends or EXACT,
        units = units < EXACT and units or EXACT,
        slot = slot < 0 and -1 or math.min(slot, MOST_SLOTS),
        stage = stage,
        flags = flags,
        place = place < EXACT and place or EXACT,
        since = since, -- not converted: rarely needed
        owner = string.sub(rest, 1, length),
        run = string.sub(rest, length + 1),
    }
end

-- Returns whether a grant is the owner's for the run, and no other message of the run is in flight. Faster
-- than to read the grant.
local function is_last_of(row, owner, run)
    local flags, names = string.match(row, '^%d+ %d+ %-?%d+ %a(%w*) %d+ %d+ (.*)$')
    return names == #owner .. ' ' .. owner .. run and not string.find(flags, AGAIN, 1, true)
end

-- Returns the shared grants among fields and values of the record.
local function grants_in(words)
    local found = {}
    for i = 1, #words, 2 do
        found[#found + 1] = string.sub(words[i], 1, 2) == 'g:' and read_grant(words[i + 1]) or nil
    end
    return found
end

-- Returns the shared grants that have not ended: those among `words`, or all.
local function live_grants(words)
    local found = {}
    for _, grant in ipairs(grants_in(words or redis.call('HGETALL', LOCK))) do
        found[#found + 1] = grant.ends > now_ms and grant or nil
    end
    return found
end

local function row_of(grant)
    local stage, owner = grant.stage .. grant.flags, grant.owner
    local form = '%d %d %d %s %d %s %d '
    local head = string.format(form, grant.ends, grant.units, grant.slot, stage, grant.place, grant.since, #owner)
    return head .. owner .. grant.run -- both may contain any bytes
end

-- Returns the task id of a run, which may be one of several attempts.
local function task_of(run)
    return string.match(run, '^(.*):%d+:%d+:%d+$') or run
end

-- Reads the key, and the grants of an owner and a run.
local function load(owner, run)
    local found = redis.call('HMGET', LOCK, 'token', 'x', 'count', 'rest', 'was', 'start:' .. owner)
    key.grants, key.owners, key.attempts, key.lanes, key.count, key.late = {}, {}, {}, {}, 0, 0
    key.token, key.alone, key.start = found[1] or nil, read_grant(found[2]), found[6]
    key.rest, key.was = known_number(found[4]), found[5] or nil
    if found[3] then
        load_shared(owner, run)
    end
end

-- Returns an owner's grant, or nothing.
local function grant_of(owner)
    if key.alone then
        return key.alone.owner == owner and key.alone or nil
    end
    if key.count == 0 then
        return nil
    end
    if key.grants[owner] == nil then
        key.grants[owner] = read_grant(redis.call('HGET', LOCK, 'g:' .. owner)) or false
    end
    local found = key.grants[owner]
    return found and found.ends > now_ms and found or nil
end

-- Returns the grant that is reserved or kept for a run, or nothing.
local function grant_for(run)
    return run ~= '' and grant_of(reserved_owner(run)) or nil
end

-- Returns the owner of a run's shared grant, or nothing.
local function owner_of(run)
    if key.owners[run] == nil then
        key.owners[run] = redis.call('HGET', LOCK, 'o:' .. run)
    end
    return key.owners[run]
end

-- Returns the grant that a run holds; a reservation does not count.
local function held_by(run)
    local grant = key.alone
    if run == '' or (grant and grant.run ~= run) then
        return nil
    elseif not grant then
        local owner = key.count > 0 and owner_of(run)
        grant = owner and grant_of(owner)
    end
    return grant and grant.owner ~= reserved_owner(run) and grant or nil
end

-- Reads the clock and the key, and removes grants that have ended.
local function look(owner, run)
    read_clock()
    load(owner, run)
    if key.token and not (key.alone and key.alone.ends > now_ms) then
        prune()
    end
end

-- Sets the record's expiry. If the server refuses, deletes the record and returns the refusal.
local function begin_lease(for_ms)
    local set = redis.pcall('PEXPIRE', LOCK, for_ms)
    if type(set) == 'table' then
        redis.call('DEL', LOCK)
        return set
    end
end

-- Writes an exclusive grant, faster than row_of() would. Returns the token and the end, or nothing and the
-- server's refusal.
local function write_alone(owner, run, for_ms, stage, place)
    local token, refused = mint()
    if not token then
        return nil, refused
    end
    local ends = math.ceil(now_ms + for_ms)
    local head = string.format('%d', ends) .. ' 0 -1 ' .. stage .. ' ' .. place .. ' ' .. clock .. ' ' .. #owner
    redis.call('HSET', LOCK, 'token', token, 'x', head .. ' ' .. owner .. run)
    refused = begin_lease(for_ms)
    if refused then
        return nil, refused
    end
    return token, ends
end

-- Grants the key exclusively. Returns the token, or nothing and the server's refusal.
local function grant_alone(owner, run, for_ms, stage, place, flags)
    local token, ends = write_alone(owner, run, for_ms, stage .. flags, string.format('%d', place))
    if not token then
        return nil, ends
    end
    if key.is_stale and (key.start or key.was) then
        redis.call('HDEL', LOCK, 'start:' .. key.gone, 'was') -- of the previous grant
    end
    local grant = { owner = owner, run = run, units = 0, slot = -1, since = clock, flags = flags }
    grant.ends, grant.stage, grant.place = ends, stage, place
    key.alone, key.token, key.is_stale = grant, token, false
    return token, -1
end

-- Returns the owner and the run of one holder, and in how many ms that may change.
local function a_holder()
    if key.alone then
        local ends = math.max(key.alone.ends, key.rest)
        return key.alone.owner, key.alone.run, math.max(0, math.floor(ends - now_ms))
    elseif key.count == 0 then
        return '', '', key.rest > now_ms and math.ceil(key.rest - now_ms) or LOOK_MS
    end
    local last = key.last and grant_of(key.last)
    if not last and key.count <= FEW then -- it has released; any other holder will do
        last = live_grants()[1]
    end
    local left_ms = math.max(0, math.ceil(key.next - now_ms))
    return last and last.owner or '', last and last.run or '', left_ms
end

-- Returns whether another message of the grant's run is in flight.
local function may_come_again(grant)
    return grant ~= nil and string.find(grant.flags, AGAIN, 1, true) ~= nil
end

-- Returns the names of the fields that a key has only while it has shared grants.
local function shared_fields()
    return 'count', 'used', 'next', 'slots', 'last', 'capacity', 'late', 'rests', 'kept', 'up', 'scan'
end

-- Reads the sums of the shared grants, and the grants of an owner and a run.
local function load_shared(owner, run)
    local reserved, task = reserved_owner(run), task_of(run)
    local names = { 'g:' .. owner, 'g:' .. reserved, 'o:' .. run, 't:' .. task }
    local found = redis.call('HMGET', LOCK, names[1], names[2], names[3], names[4], shared_fields())
    key.grants[owner], key.grants[reserved] = read_grant(found[1]) or false, read_grant(found[2]) or false
    key.owners[run], key.attempts[task] = found[3], found[4]
    for number, name in ipairs({ shared_fields() }) do
        key[name] = found[number + #names] or nil
    end
    key.is_spoilt = not (tonumber(key.count) and tonumber(key.used))
    key.count, key.used = known_number(key.count), known_number(key.used)
    key.next, key.late = known_number(key.next), known_number(key.late)
end

-- Extends the record's expiry to the end of a grant or of the rest.
local function outlive(ends)
    local left_ms = math.max(1, math.ceil(math.max(ends, key.rest) - now_ms))
    if not key.alone then
        left_ms = math.max(left_ms, redis.call('PTTL', LOCK))
    end
    redis.call('PEXPIRE', LOCK, left_ms)
end

local function marked(slots, slot, mark)
    if slot < 0 then
        return slots
    end
    slots = slots .. string.rep('0', slot + 1 - #slots)
    return string.sub(slots, 1, slot) .. mark .. string.sub(slots, slot + 2)
end

-- Deletes the record of a key without holders, except a rest that goes on.
local function tidy()
    if key.alone or key.count > 0 or not key.token then
        if key.is_stale and not key.alone then
            redis.call('HDEL', LOCK, 'x', 'was') -- an interrupted script left it
            key.is_stale = false
        end
        return
    end
    if key.rest > now_ms then
        redis.call('PEXPIRE', LOCK, math.ceil(key.rest - now_ms))
        redis.call('HDEL', LOCK, 'x', 'was', 'start:' .. (key.gone or ''), shared_fields())
    else
        redis.call('DEL', LOCK)
        key.token = nil
    end
    key.is_stale = false
end

local function upgrading()
    local inbox, owner = string.match(key.up or '', '^(%S*) (.+)$')
    return owner, inbox
end

-- Returns the attempt of a task that was granted last, while it holds the key.
local function last_attempt(task)
    if key.attempts[task] == nil then
        key.attempts[task] = redis.call('HGET', LOCK, 't:' .. task)
    end
    return key.attempts[task]
end

-- Returns the fields of a shared grant, of its run, and of what depends on both.
local function fields_of(grant)
    local owner, run = grant.owner, grant.run
    local fields = { 'g:' .. owner, row_of(grant), 'next', integer(key.next), 'last', owner }
    if run ~= '' then
        local task = task_of(run)
        fields[7], fields[8], fields[9], fields[10] = 'o:' .. run, owner, 't:' .. task, run
        key.owners[run], key.attempts[task] = owner, run
    end
    return fields
end

local function forget_run_of(run)
    local task = task_of(run)
    if last_attempt(task) == run then
        redis.call('HDEL', LOCK, 'o:' .. run, 't:' .. task)
        key.attempts[task] = false
    else
        redis.call('HDEL', LOCK, 'o:' .. run)
    end
    key.owners[run] = false
end

-- Removes a shared grant and its reserved start; count_down() or sum_up() corrects the sums.
local function forget_shared(grant)
    local owner, run = grant.owner, grant.run
    if string.find(grant.flags, STARTS, 1, true) then
        leave_start(owner)
    end
    redis.call('HDEL', LOCK, 'g:' .. owner, 'start:' .. owner)
    key.grants[owner] = false
    if run ~= '' and owner_of(run) == owner then
        forget_run_of(run)
    end
    if upgrading() == owner then
        redis.call('HDEL', LOCK, 'up')
        key.up = nil
    end
end

-- Returns how a grant notes a lane.
local function noted_as(lane)
    return LANE .. string.gsub(lane, '..?.?.?.?.?.?.?', function(part)
        return string.format(string.rep('%02X', #part), string.byte(part, 1, -1))
    end)
end

-- Returns the lane that a grant notes, as it notes it; nothing if it does not.
local function noted_lane(grant)
    return string.match(grant.flags, LANE .. '[%u%d]*')
end

-- Returns the units of the grants that note a lane.
local function lane_used(noted)
    if key.lanes[noted] == nil then
        key.lanes[noted] = key.count > 0 and known_number(redis.call('HGET', LOCK, 'm:' .. noted)) or 0
    end
    return key.lanes[noted]
end

-- Writes the units of a lane, which are fewer than before: its next waiter may be admitted.
local function write_lane(noted)
    if key.lanes[noted] > 0 and key.count > 0 then
        redis.call('HSET', LOCK, 'm:' .. noted, key.lanes[noted])
    else
        redis.call('HDEL', LOCK, 'm:' .. noted)
    end
    local lane = string.gsub(string.sub(noted, #LANE + 1), '..', function(code)
        return string.char(tonumber(code, 16))
    end)
    uncap(lane)
end

-- Subtracts a grant from the sums. Returns its lane, if it notes one: the caller must write its units.
local function count_down(grant)
    local noted = noted_lane(grant)
    if noted then
        key.lanes[noted] = lane_used(noted) - grant.units
    end
    key.used, key.count = key.used - grant.units, key.count - 1
    key.slots = marked(key.slots or '', grant.slot, '0')
    return noted
end

-- Removes a grant. With `is_handed_on` the record of an exclusive grant stays, for the next grant or
-- tidy() to change.
local function vacate(grant, is_handed_on)
    local has_start = string.find(grant.flags, STARTS, 1, true)
    if grant.units > 0 and key.count == 1 and key.rest <= now_ms and not has_start then
        count_down(grant)
        key.grants, key.owners, key.attempts, key.up = {}, {}, {}, nil
        tidy() -- it deletes the record
        return
    elseif grant.units > 0 then
        forget_shared(grant)
        local noted = count_down(grant)
        if key.count > 0 then
            redis.call('HSET', LOCK, 'used', key.used, 'count', key.count, 'slots', key.slots)
        end
        if noted then
            write_lane(noted)
        end
        tidy()
        return
    end
    if has_start then
        leave_start(grant.owner)
    end
    key.alone, key.is_stale, key.gone = nil, true, grant.owner
    local twin = grant_of(grant.owner) -- of an interrupted upgrade
    if twin then
        vacate(twin)
    end
    if not is_handed_on then
        tidy()
    end
end

-- Corrects the units of each lane; `words` are all fields and values of the record.
local function correct_lanes(words, by_lane)
    for i = 1, #words, 2 do
        local noted = string.match(words[i], '^m:([%u%d]+)$')
        local units = noted and by_lane[noted] or 0
        if noted and (key.lanes[noted] or known_number(words[i + 1])) ~= units then
            key.lanes[noted] = units
            write_lane(noted)
        end
    end
end

-- Scans the shared grants, up to MANY a call, and removes those that have ended. A complete scan also
-- recomputes the sums.
local function prune_shared()
    local cursor, soonest = string.match(key.scan or '', '^(%d+) (%d+)$')
    local next_cursor, found = unpack(redis.call('HSCAN', LOCK, cursor or '0', 'COUNT', MANY))
    local used, count, slots, by_lane = 0, 0, '', {}
    soonest = tonumber(soonest or EXACT)
    redis.call('PEXPIRE', LOCK, math.max(1, redis.call('PTTL', LOCK))) -- first, as in write_grant()
    for _, grant in ipairs(grants_in(found)) do
        if grant.ends <= now_ms then
            forget_shared(grant)
            local noted = count_down(grant)
            if noted then
                write_lane(noted)
            end
        else
            used, count, slots = used + grant.units, count + 1, marked(slots, grant.slot, '1')
            soonest = math.min(soonest, grant.ends)
            local noted = noted_lane(grant) or ''
            by_lane[noted] = (by_lane[noted] or 0) + grant.units
        end
    end
    if next_cursor ~= '0' then
        redis.call('HSET', LOCK, 'scan', next_cursor .. ' ' .. integer(soonest))
    elseif cursor then
        redis.call('HDEL', LOCK, 'scan')
        key.next = math.min(soonest, now_ms + AGAIN_MS) -- other grants may have come behind the cursor
    else
        key.used, key.count, key.slots, key.next = used, count, slots, soonest
        correct_lanes(found, by_lane)
    end
    local slots_now = key.slots or ''
    redis.call('HSET', LOCK, 'next', integer(key.next), 'used', key.used, 'count', key.count, 'slots', slots_now)
end

-- Recomputes the sums of the shared grants.
local function sum_up()
    redis.call('HDEL', LOCK, 'scan')
    key.scan = nil
    prune_shared()
end

-- Removes grants that have ended. Must precede every look at the holders.
local function prune()
    if key.alone then
        if key.alone.ends <= now_ms then
            vacate(key.alone)
        end
    elseif key.is_spoilt or (key.count > 0 and key.next <= now_ms) then
        prune_shared()
        tidy()
    elseif key.count == 0 then
        tidy()
    end
end

-- Returns the units that a want takes. An operator's limit does not change them: it may end first.
local function needed(want)
    return math.max(1, want.capacity == 0 and want.units or math.min(want.units, want.capacity))
end

local function first_slot(need, of)
    if need == 1 and of > 1 and of <= MOST_SLOTS then
        return string.find((key.slots or '') .. '0', '0', 1, true) - 1
    end
    return -1
end

-- Writes a new share, the sums with it, and the token of the first one. Returns a refusal of the server.
local function add_share(grant, of, token)
    local noted = noted_lane(grant)
    local in_lane = noted and lane_used(noted) + grant.units
    key.used, key.count = key.used + grant.units, key.count + 1
    key.slots = marked(key.slots or '', grant.slot, '1')
    key.next, key.late = math.min(key.next, grant.ends), math.max(key.late, grant.place)
    local fields = fields_of(grant)
    if token then
        fields[#fields + 1] = 'token'
        fields[#fields + 1] = token
    end
    if noted then
        fields[#fields + 1], fields[#fields + 2] = 'm:' .. noted, in_lane
        key.lanes[noted] = in_lane
    end
    local slots, late = key.slots, integer(key.late)
    local written = redis.pcall(
        'HSET', LOCK, 'used', key.used, 'count', key.count, 'slots', slots, 'late', late, 'capacity', of, unpack(fields)
    )
    if type(written) == 'table' then
        return written -- the server is full
    end
    if key.is_stale then
        redis.call('HDEL', LOCK, 'x', 'was', 'rest', 'start:' .. (key.gone or ''))
    end
end

-- Grants a share. Returns the token and the slot, or nothing and the server's refusal.
local function grant_shared(owner, run, for_ms, want, stage, place, flags)
    local token, refused = key.token, nil
    local is_first = key.count == 0
    if is_first then
        token, refused = mint()
        if not token then
            return nil, refused
        end
        key.used, key.next, key.slots, key.late = 0, EXACT, '', 0
    elseif run ~= '' and key.owners[run] == owner and grant_of(owner) then
        count_down(grant_of(owner)) -- the script that granted it was interrupted
    end
    local of = limit_now().capacity or want.capacity
    local grant = { owner = owner, run = run, units = needed(want), since = clock, flags = flags }
    grant.flags = want.lane and flags .. noted_as(want.lane) or flags
    grant.ends, grant.stage, grant.place = math.ceil(now_ms + for_ms), stage, place
    grant.slot = first_slot(grant.units, of)
    refused = add_share(grant, of, is_first and token or nil) or (is_first and begin_lease(for_ms))
    if refused then
        return nil, refused
    elseif not is_first then
        outlive(grant.ends)
    end
    key.grants[owner], key.token = grant, token
    key.last, key.capacity, key.is_stale = owner, of, false
    return token, grant.slot
end

local function grant_to(owner, run, for_ms, want, stage, place, flags)
    if want.capacity == 1 then
        return grant_alone(owner, run, for_ms, stage, place, want.lane and flags .. LANED or flags)
    end
    return grant_shared(owner, run, for_ms, want, stage, place, flags)
end

-- Writes a changed grant. PEXPIRE comes first: a full server never refuses it.
local function write_grant(grant)
    outlive(grant.ends)
    if grant.units == 0 then
        redis.call('HSET', LOCK, 'x', row_of(grant))
        return
    end
    key.next, key.last = math.min(key.next, grant.ends), grant.owner
    key.grants[grant.owner] = grant
    redis.call('HSET', LOCK, unpack(fields_of(grant)))
end

-- Extends a lease; never shortens it.
local function lengthen(grant, for_ms)
    grant.ends = math.max(grant.ends, math.ceil(now_ms + for_ms))
    write_grant(grant)
end

-- Transfers a grant to another owner: one that claims it, or the reservation of a run.
local function pass(grant, owner, run, for_ms, stage)
    local before, its_run = grant.owner, grant.run
    local twin = before ~= owner and grant.units > 0 and grant_of(owner)
    local ends = math.ceil(now_ms + for_ms)
    grant.ends = before == owner and math.max(ends, grant.ends) or ends
    grant.owner, grant.run, grant.stage = owner, run, stage
    grant.place = stage == HELD and grant.place or 0
    grant.flags = string.gsub(grant.flags, STARTS, '')
    write_grant(grant)
    if grant.units == 0 then
        return
    elseif before ~= owner then
        redis.call('HDEL', LOCK, 'g:' .. before, 'start:' .. before)
        key.grants[before] = false
    end
    if its_run ~= '' and its_run ~= run then
        forget_run_of(its_run)
    end
    if twin then
        sum_up()
    end
end

local function flag(grant, letter, more)
    if not string.find(grant.flags, letter, 1, true) then
        grant.flags = grant.flags .. letter .. (more or '')
        redis.call('HSET', LOCK, grant.units == 0 and 'x' or 'g:' .. grant.owner, row_of(grant))
    end
end

-- Makes the only shared grant exclusive. Returns the token.
local function make_alone(grant, for_ms)
    local was = string.format('%d %d %d', grant.units, grant.slot, known_number(key.capacity))
    local owner, run, noted = grant.owner, grant.run, noted_lane(grant)
    grant.ends = math.max(grant.ends, math.ceil(now_ms + for_ms))
    grant.units, grant.slot, grant.stage, grant.place = 0, -1, HELD, 0
    outlive(grant.ends)
    local token = mint() or key.token
    redis.call('HSET', LOCK, 'token', token, 'x', row_of(grant), 'was', was)
    redis.call('HDEL', LOCK, 'g:' .. owner, 'o:' .. run, 't:' .. task_of(run), shared_fields())
    key.alone, key.token, key.count, key.used, key.up, key.was = grant, token, 0, 0, nil, was
    if noted then
        key.lanes[noted] = 0
        write_lane(noted)
    end
    return token
end

-- Makes an exclusive grant shared, with the units from before its upgrade, or one unit. Returns the
-- token and the slot.
local function make_shared(grant, for_ms)
    local units, slot, of = string.match(key.was or '', '^(%d+) (%-?%d+) (%d+)$')
    local want = { units = tonumber(units or 1), capacity = 0 }
    local left_ms = math.max(for_ms, math.ceil(grant.ends - now_ms))
    key.alone, key.count = nil, 0
    local token = grant_shared(grant.owner, grant.run, left_ms, want, HELD, 0, grant.flags)
    local shared = key.grants[grant.owner]
    if units then
        shared.slot = tonumber(slot)
        key.slots = marked('', shared.slot, '1')
        redis.call('HSET', LOCK, 'slots', key.slots, 'capacity', of)
    end
    write_grant(shared)
    redis.call('HDEL', LOCK, 'x', 'was')
    key.was = nil
    return token, shared.slot
end

local function settle_upgrade()
    if not key.up then
        return false
    end
    local owner, inbox = upgrading()
    local grant = owner and grant_of(owner)
    if not grant then
        redis.call('HDEL', LOCK, 'up') -- no such holder
        key.up = nil
        return false
    end
    if key.count == 1 then
        make_alone(grant, 0)
        publish(inbox, owner)
    end
    return true
end

