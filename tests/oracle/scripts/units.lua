-- units.lua: a key that several hold. Its records are those of any other key: `lock` has the owner
-- "several:" then, and beside it who holds.
-- KEYS lock queue tasks woken fence done rate
--
-- lock   token: of the time in which it is shared without a gap; used: units in use; holders: how
--        many hold; next: no lease of theirs ends before that (ms); slots: which of the units are in
--        use that are told from each other, '0' or '1' each; last: who was granted it last;
--        capacity: with which capacity; rest: nobody enters before that (ms); up: the inbox and
--        owner of one who waits to have it alone. h:<owner> of each holder: the end of its lease
--        (ms), its units, its slot (-1: none), its arrival (µs) if it has not come for it yet (else
--        0), when it was granted it (µs), and its run; o:<run> the owner that a run has it by.
--        The record expires with the last of the leases.
-- tasks  w:<member> how much one wants that waits and does not just want it alone, as
--        units/capacity, and /terms where it has rates
-- USES rates

local SHARED = 'several:'
local MOST_SLOTS = 1024
local FEW = 64 -- holders that are looked through for one

-- Reads how much is wanted: units/capacity, or units/capacity/terms; all of it if nothing is written.
local function want_in(text)
    local units, capacity, rest = string.match(text or '', '^(%d+)/(%d+)(.*)$')
    return tonumber(units or 1), tonumber(capacity or 1), string.match(rest or '', '^/(%S+)$')
end

local function integers(...)
    return string.format('%.0f %.0f %.0f %.0f %.0f ', ...)
end

local function read(entry)
    local found = { string.match(entry or '', '^(%d+) (%d+) (%-?%d+) (%d+) (%d+) (.*)$') }
    if not found[1] then
        return nil -- nobody, or somebody else's words
    end
    local ends, units, slot, due, since = unpack(found, 1, 5)
    return {
        ends = tonumber(ends),
        units = tonumber(units),
        slot = tonumber(slot),
        due = tonumber(due),
        since = tonumber(since),
        run = found[6],
    }
end

-- Before the other writes of a script, the first of which a full server refuses; but not this one.
local function begin_to_write()
    redis.call('PEXPIRE', LOCK, math.max(1, redis.call('PTTL', LOCK)))
end

-- Leaves the record no fields but these, of which it has one at least. It is not deleted and made
-- anew: while a cluster moves its slot, a script ends where it touches what it has deleted.
local function keep_only(...)
    local keeps = {}
    for _, field in ipairs({ ... }) do
        keeps[field] = true
    end
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        if not keeps[fields[i]] then
            redis.call('HDEL', LOCK, fields[i])
        end
    end
end

-- Who waits to have alone what it shares, and its inbox; nothing: nobody.
local function upgrading(up)
    local inbox, owner = string.match(up or '', '^(%S*) (.+)$')
    return owner, inbox
end

-- What an owner has of a key that several hold.
local function share_of(owner)
    return read(redis.call('HGET', LOCK, 'h:' .. owner))
end

local function write_share(owner, share)
    local entry = integers(share.ends, share.units, share.slot, share.due, share.since) .. share.run
    return redis.pcall('HSET', LOCK, 'h:' .. owner, entry)
end

-- Lets the record live for as long as its last holder.
local function outlive(ends, now)
    local left_ms = math.max(1, math.ceil(ends - now / 1000))
    if redis.call('PTTL', LOCK) < left_ms then
        redis.call('PEXPIRE', LOCK, left_ms)
    end
end

-- Lets the record live until the key has rested, however soon the lease of who has it ends.
local function outlive_rest(now)
    local rest = tonumber(redis.call('HGET', LOCK, 'rest') or 0) or 0
    if rest > now / 1000 then
        outlive(rest, now)
    end
end

local function marked(slots, slot, mark)
    if slot < 0 then
        return slots
    end
    slots = slots .. string.rep('0', slot + 1 - #slots)
    return string.sub(slots, 1, slot) .. mark .. string.sub(slots, slot + 2)
end

local function forget_share(owner, share)
    redis.call('HDEL', LOCK, 'h:' .. owner, 'stamp:' .. share.run, 'from:' .. share.run, 'start:' .. owner)
    if redis.call('HGET', LOCK, 'o:' .. share.run) == owner then
        redis.call('HDEL', LOCK, 'o:' .. share.run, 'again:' .. share.run)
    end
    if upgrading(redis.call('HGET', LOCK, 'up')) == owner then
        redis.call('HDEL', LOCK, 'up')
    end
end

-- Counts a share no more that has been struck; what is given stood in the record.
local function uncount(share, used, holders, slots)
    slots = marked(slots or '', share.slot, '0')
    redis.call('HSET', LOCK, 'used', used - share.units, 'holders', holders - 1, 'slots', slots)
end

-- Ends the time in which the key is shared if nobody has it, and it does not rest.
local function end_phase(now)
    local holders, rest = unpack(redis.call('HMGET', LOCK, 'holders', 'rest'))
    if holders == '0' and (tonumber(rest or 0) or 0) <= now / 1000 then
        redis.call('DEL', LOCK)
    elseif holders == '0' then
        outlive_rest(now)
    end
end

-- Counts anew, from those whose leases last.
local function recount(now)
    local used, holders, next_ms, taken, gone = 0, 0, math.huge, {}, {}
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local owner = string.match(fields[i], '^h:(.*)$')
        local share = owner and (read(fields[i + 1]) or { ends = 0, run = '' })
        if share and share.ends <= now / 1000 then
            gone[owner] = share
        elseif share then
            used, holders = used + share.units, holders + 1
            next_ms = math.min(next_ms, share.ends)
            taken[share.slot] = true
        end
    end
    for owner, share in pairs(gone) do
        forget_share(owner, share)
    end
    local slots = {}
    for slot = 0, MOST_SLOTS - 1 do
        slots[slot + 1] = taken[slot] and '1' or '0'
    end
    local marks = string.match(table.concat(slots), '^(.-)0*$')
    local soonest = integer(math.min(next_ms, EXACT))
    redis.call('HSET', LOCK, 'used', used, 'holders', holders, 'next', soonest, 'slots', marks)
end

-- Strikes those whose leases have ended; before anything is said of who holds. What somebody else has
-- made of the counts is counted anew.
local function prune(now)
    local owner, next_ms, used, holders =
        unpack(redis.call('HMGET', LOCK, 'owner', 'next', 'used', 'holders'))
    if owner == SHARED then
        local is_read = tonumber(used or 0) and tonumber(holders or 0)
        if not is_read or (tonumber(next_ms or 0) or 0) <= now / 1000 then
            begin_to_write()
            recount(now)
        end
        end_phase(now)
    end
end

-- How many units are taken, whatever an operator allows: his limit may end before the lease.
local function needed(units, capacity)
    return math.max(1, capacity == 0 and units or math.min(units, capacity))
end

-- Whether so much of it is free.
local function fits(units, capacity, now, known)
    if limit_at(now).capacity == 0 then
        return false
    end
    local owner, used, holders, rest, up =
        unpack(known or redis.call('HMGET', LOCK, 'owner', 'used', 'holders', 'rest', 'up'))
    if not owner then
        return true
    end
    if owner ~= SHARED or up or (tonumber(rest or 0) or 0) > now / 1000 then
        return false
    end
    if capacity == 1 or holders == '0' then
        return holders == '0'
    end
    local of, in_use = limit_at(now).capacity or capacity, tonumber(used or 0)
    return in_use ~= nil and (of == 0 or in_use + needed(units, capacity) <= of)
end

-- Whether so much may be taken now, if it is one's turn.
local function admits(units, capacity, now, terms, known)
    return fits(units, capacity, now, known) and starts_in(terms, now) == 0
end

local COUNTED = { 'owner', 'used', 'holders', 'rest', 'up', 'token', 'next', 'slots', 'since' }

-- Lets an owner in beside others. Returns the token and the slot, or nothing and the refusal. What
-- is `known` are the fields COUNTED.
local function admit(now, owner, run, lease_ms, units, capacity, due, known)
    local need, of = needed(units, capacity), limit_at(now).capacity or capacity
    local holder, used, holders, _, _, token, next_ms, slots, since =
        unpack(known or redis.call('HMGET', LOCK, unpack(COUNTED)))
    local begins = {}
    local is_first = holder ~= SHARED
    if is_first then
        local refused
        token, refused = mint(now)
        if not token then
            return nil, refused
        end
        used, holders, next_ms, slots, since = 0, 0, EXACT, '', 0
        begins = { 'owner', SHARED, 'token', token, 'run', '' }
    end
    local slot = -1
    if need == 1 and of > 1 and of <= MOST_SLOTS then
        slot = string.find((slots or '') .. '0', '0', 1, true) - 1
    end
    since = math.max(now, (tonumber(since) or 0) + 1)
    used, holders, slots = tonumber(used) or 0, tonumber(holders) or 0, slots or ''
    local ends = math.ceil(now / 1000) + tonumber(lease_ms)
    local share = integers(ends, need, slot, due, since) .. run
    local soonest = integer(math.min(ends, tonumber(next_ms) or 0))
    used, holders, slots = used + need, holders + 1, marked(slots, slot, '1')
    local fields = { 'h:' .. owner, share, 'used', used, 'holders', holders, 'next', soonest }
    local others = { 'slots', slots, 'since', integer(since), 'last', owner, 'capacity', of }
    if tonumber(due) > 0 then
        local latest = tonumber(redis.call('HGET', LOCK, 'due') or 0) or 0
        others[#others + 1] = 'due'
        others[#others + 1] = integer(math.max(due, is_first and 0 or latest))
    end
    for _, each in ipairs(others) do
        fields[#fields + 1] = each
    end
    if run ~= '' then
        fields[#fields + 1] = 'o:' .. run
        fields[#fields + 1] = owner
    end
    for _, each in ipairs(begins) do
        fields[#fields + 1] = each
    end
    local refused = redis.pcall('HSET', LOCK, unpack(fields))
    if type(refused) == 'table' then
        return nil, refused -- the server is full
    end
    refused = is_first and begin_lease(lease_ms)
    if refused then
        return nil, refused
    elseif not is_first then
        outlive(ends, now)
    end
    return token, slot
end

-- Gives the share of one owner to another, who may have another run, for so long from now.
local function pass_on(owner, share, another, run, for_ms, now)
    begin_to_write()
    local again, stamp =
        unpack(redis.call('HMGET', LOCK, 'again:' .. share.run, 'stamp:' .. share.run))
    local stood = stamp and share.run == run
    if owner ~= another then
        local other = share_of(another)
        forget_share(owner, share)
        if other then
            forget_share(another, other)
            uncount(other, unpack(redis.call('HMGET', LOCK, 'used', 'holders', 'slots')))
        end
    end
    share.ends = math.max(owner == another and share.ends or 0, math.ceil(now / 1000) + tonumber(for_ms))
    share.run, share.due = run, 0
    write_share(another, share)
    redis.call('HSET', LOCK, 'last', another)
    if run ~= '' then
        redis.call('HSET', LOCK, 'o:' .. run, another)
        if again then
            redis.call('HSET', LOCK, 'again:' .. run, 1)
        end
        if stood then
            redis.call('HSET', LOCK, 'stamp:' .. run, stamp)
        end
    end
    local soonest = math.min(share.ends, tonumber(redis.call('HGET', LOCK, 'next') or 0) or 0)
    redis.call('HSET', LOCK, 'next', integer(soonest))
    outlive(share.ends, now)
end

-- Takes from an owner what it has of the key. Nothing: that is nothing.
local function vacate(owner, now)
    leave_start(owner, now)
    local holder, rest = unpack(redis.call('HMGET', LOCK, 'owner', 'rest'))
    if holder == owner and (tonumber(rest or 0) or 0) > now / 1000 then
        -- First: a full server refuses what begins with HSET.
        redis.call('PEXPIRE', LOCK, math.ceil(tonumber(rest) - now / 1000))
        keep_only('token', 'rest')
        redis.call('HSET', LOCK, 'owner', SHARED, 'run', '', 'slots', '', 'since', 0)
        redis.call('HSET', LOCK, 'used', 0, 'holders', 0, 'next', integer(EXACT))
        return true
    elseif holder == owner then
        redis.call('DEL', LOCK)
        return true
    end
    local share = holder == SHARED and share_of(owner)
    if share then
        forget_share(owner, share)
        uncount(share, unpack(redis.call('HMGET', LOCK, 'used', 'holders', 'slots')))
        end_phase(now)
        return true
    end
end

-- Gives one who shares the key with nobody all of it; returns the token.
local function convert(now, owner, lease_ms)
    local share = share_of(owner)
    local again, capacity = unpack(redis.call('HMGET', LOCK, 'again:' .. share.run, 'capacity'))
    local ends = math.max(share.ends, math.ceil(now / 1000) + tonumber(lease_ms))
    begin_to_write()
    local token = grant(now, owner, share.run, math.ceil(ends - now / 1000))
    keep_only('owner', 'token', 'run', 'rest', 'start:' .. owner)
    if again then
        redis.call('HSET', LOCK, 'again', again)
    end
    outlive_rest(now)
    redis.call('HSET', LOCK, 'was', string.format('%d %d %d', share.units, share.slot, capacity or 0))
    return token
end

-- Whether a run has the key itself, not only a claim to it; and until when (ms from now).
local function holds(run, now)
    local owner, its_run = unpack(redis.call('HMGET', LOCK, 'owner', 'run'))
    if owner == SHARED then
        owner = redis.call('HGET', LOCK, 'o:' .. run)
        local share = owner and owner ~= 'parked:' .. run and share_of(owner)
        if not share then
            return false
        end
        return true, math.max(0, share.ends - now / 1000)
    end
    if its_run ~= run or owner == 'parked:' .. run then
        return false
    end
    return true, redis.call('PTTL', LOCK)
end

-- Whether something of the key is kept for a run.
local function keeps_for(run)
    local owner = redis.call('HGET', LOCK, 'owner')
    return owner == 'parked:' .. run
        or (owner == SHARED and redis.call('HEXISTS', LOCK, 'h:parked:' .. run) == 1)
end

-- One who has the key, and its run, for those who look.
local function one_holder()
    local owner, token, run, last = unpack(redis.call('HMGET', LOCK, 'owner', 'token', 'run', 'last'))
    if owner ~= SHARED then
        return owner or '', token or '0', run or ''
    end
    if not (last and redis.call('HEXISTS', LOCK, 'h:' .. last) == 1) then
        last = nil -- it has left; any other one would do, but to find one among thousands takes long
        local few = (tonumber(redis.call('HGET', LOCK, 'holders') or 0) or 0) <= FEW
        for _, field in ipairs(few and redis.call('HGETALL', LOCK) or {}) do
            last = last or string.match(field, '^h:(.*)$') -- no value begins so
        end
    end
    local share = last and share_of(last)
    return last or '', token or '0', share and share.run or ''
end
