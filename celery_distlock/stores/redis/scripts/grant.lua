-- grant.lua: what it is to give a key to somebody; the names of a key's records.
-- KEYS lock queue tasks woken fence done rate
--
-- lock   hash    owner, token, run; expires with the lease. A key that is on its way to a parked
--                task has the owner "parked:<run>" until that task claims it; due: the arrival (µs)
--                of one who was handed the key and has not come for it yet; rated: his start is
--                counted when he comes. Where he needs several keys: stamp:<run> of him, until he
--                gives this one up, and from, who gave it up for him
-- queue  zset    who waits, by arrival (µs): "p:<run>" parked, "b:<inbox> <owner>" blocked
-- tasks  hash    of every run that is parked or on its way: e:<run> its envelope, s:<run> its
--                arrival, h:<run> the channel of a worker that takes it, q:<run> the destination to
--                which it was sent, if it has not come from there, t:<run> its task's name,
--                n:<run> how often it was sent; of one that has come for its key since, -1 less
--                that. i:<run> the identity that it was sent with. d:<run> how often it was pushed to
--                a worker that had not parked it, and that did not take it; PUSHES if the broker was
--                given it, or its caller publishes it. Of one that stands at several
--                keys, as it cannot be sent yet: at each of them k:<run> their names, with its task's, and
--                l:<run> once the key was kept for it; its envelope is at the first, else empty
-- woken  zset    runs on their way, by the time (ms) at which they are sent again; also runs that
--                have come but that nobody else keeps until they end
-- fence  string  the last token: the time (µs) of the grant, or more if the clock was set back
-- rate   hash    how often the key was taken of late, as rates.lua has it
-- done   zset    runs that have ended and whose message may come again, by their end (ms); as
--                "~<run>" those whose result is not stored yet, by the time (ms) when they are
--                taken for dead; as "+<run>" those of which the broker may have another message, by
--                the time (ms) until which their end must be known

local RECORDS = 7 -- of each key
local LOCK, QUEUE, TASKS, WOKEN, FENCE, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local RATE = KEYS[7]

-- Goes on with the key whose records are the next ones in KEYS, and so on.
local function turn_to(number)
    local last = RECORDS * number
    LOCK, QUEUE, TASKS, WOKEN, FENCE, DONE, RATE = unpack(KEYS, last - RECORDS + 1, last)
end

local FENCE_MS = 3600000 -- a token only has to outlive a clock that was set back
local EXACT = 2 ^ 53 -- no number beyond it is a token of ours

-- Replaces infinite numbers of fields by the greatest: a record that others have spoilt may have them, and
-- JSON has not.
local function finite(fields)
    for name, value in pairs(fields) do
        if type(value) == 'table' then
            finite(value)
        elseif type(value) == 'number' and not (math.abs(value) < EXACT) then
            fields[name] = EXACT
        end
    end
    return fields
end

-- Returns fields as an answer names them: as JSON.
local function named(fields)
    return cjson.encode(finite(fields))
end

local function microseconds()
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

-- A Lua number is a double: microseconds fit exactly, but tostring() would round them.
local function integer(number)
    return string.format('%.0f', number)
end

-- Makes the lease of who has the key as long as was asked for, and never shorter.
local function lengthen(lease_ms)
    if redis.call('PTTL', LOCK) < tonumber(lease_ms) then
        redis.call('PEXPIRE', LOCK, lease_ms)
    end
end

-- Returns a token above all before; or nothing, and what the server says, which is full.
local function mint(now)
    local token = integer(now)
    local last = redis.pcall('SET', FENCE, token, 'PX', FENCE_MS, 'GET')
    if type(last) == 'table' then
        return nil, last
    end
    local before = last and tonumber(last)
    if before and before >= now and before < EXACT then
        token = integer(before + 1)
        redis.call('SET', FENCE, token, 'PX', FENCE_MS)
    end
    return token
end

-- Ends a record of a new lock with its lease; or at once, if that is refused, which is returned: else
-- it would be there for ever.
local function begin_lease(lease_ms)
    local set = redis.pcall('PEXPIRE', LOCK, lease_ms)
    if type(set) == 'table' then
        redis.call('DEL', LOCK)
        return set
    end
end

local function grant(now, owner, run, lease_ms)
    local token, refused = mint(now)
    if not token then
        return nil, refused
    end
    redis.call('HSET', LOCK, 'owner', owner, 'token', token, 'run', run)
    refused = begin_lease(lease_ms)
    if refused then
        return nil, refused
    end
    return token
end

local GRANT_MS = 1000 -- for a blocked waiter to confirm what was pushed to it
local CLAIM_MS = 5000 -- for a woken task's message to reach a worker; doubled by others on their way
local DOUBLINGS = 2 -- at most: a key that nobody comes for is not to lie idle for longer
local UNSENT_MS = 2000 -- for a woken run to be taken from the channel, or to be sent

local function claim_ms_of(on_their_way)
    return CLAIM_MS * 2 ^ math.min(on_their_way, DOUBLINGS)
end

-- Tells how many heard it; an error, for want of a permission say, leaves open whether any did.
local function publish(channel, message)
    if string.find(channel, '{', 1, true) then
        return redis.pcall('SPUBLISH', channel, message) -- of this slot: no other node is told
    end
    return redis.pcall('PUBLISH', channel, message)
end

local near_channel, near -- of the worker that gives the key up, and the destination whose messages it takes

-- The channel to which a run is pushed: its own, or the one near by if it was sent to that destination.
local function channel_of(channel, sent_to)
    if not channel and sent_to == near then
        return near_channel
    end
    return channel
end

-- Pushes a run to a worker's channel; false if that is gone. `givers` have given the key up for it.
local function deliver(channel, run, arrival, givers, envelope)
    local head = string.format('%d %d %d %s ', #LOCK, #run, #givers, arrival or '0')
    local heard = publish(channel, head .. LOCK .. run .. givers .. envelope)
    return type(heard) == 'number' and heard > 0
end

-- Strikes a run from the parked ones; true if it was there.
local function unpark(run)
    local parked = redis.call('HDEL', TASKS, 'e:' .. run, 's:' .. run, 'h:' .. run)
    local known = { 't:' .. run, 'n:' .. run, 'd:' .. run, 'k:' .. run, 'l:' .. run, 'q:' .. run }
    redis.call('HDEL', TASKS, 'i:' .. run, 'w:p:' .. run, unpack(known))
    if parked == 0 then
        return false
    end
    redis.call('ZREM', QUEUE, 'p:' .. run)
    redis.call('ZREM', WOKEN, run)
    return true
end
