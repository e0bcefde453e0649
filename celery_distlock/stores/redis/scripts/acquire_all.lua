-- acquire_all.lua: take several keys, if all of them are free and have no waiters, or if all are
-- reserved for the run; else take none.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run lease_ms owners [repeated keep wants]
-- returns {token, slot, ...}: granted, in the order of the keys | {}: at least one is not available
--
-- The keys are the records of each key in turn. On a cluster, a server refuses keys of several slots.
--
-- owners    one for each key, separated by spaces
-- repeated  1 if the run's message may have been delivered before: all keys must be reserved for it
-- keep      see acquire.lua
-- wants     one for each key, see acquire.lua, separated by spaces; empty: all exclusive
-- USES records grants limits rates gates runs answers queue

local run, lease_ms, owners, repeated, keep, wants = unpack(ARGV)
local claims, asking, asked, granted = repeated == '1', {}, {}, {}
lease_ms = tonumber(lease_ms)
for owner in string.gmatch(owners, '%S+') do
    asking[#asking + 1] = owner
end
for want in string.gmatch(wants or '', '%S+') do
    asked[#asked + 1] = want
end

local function note(number, token, slot)
    granted[2 * number - 1], granted[2 * number] = token, slot
end

-- Grants keys that have neither holders nor waiters. This is the most frequent case.
local function take_free_keys()
    if claims or wants then
        return nil
    end
    for number in ipairs(asking) do
        turn_to(number)
        if redis.call('EXISTS', LOCK, QUEUE, TASKS) > 0 then
            return nil
        end
    end
    read_clock()
    for number, owner in ipairs(asking) do
        turn_to(number)
        local token, refused = grant_alone(owner, run, lease_ms, HELD, 0, '')
        if not token then
            granted = refused
            return true
        end
        note(number, token, -1)
    end
    return true
end

-- Whether a key is not available: neither reserved for the run as wanted, nor free.
local function is_out_of_reach(want)
    if not claims then
        return redis.call('EXISTS', QUEUE) > 0 or opens(want) or held_by(run)
    end
    local reserved, of = grant_for(run), run ~= '' and record(run)
    local ended, settles = nil, nil
    if not of then -- a run with a record has not ended
        ended, settles = ends_of(run)
    end
    return ended or settles or not reserved or not is_enough(reserved, want) or claim_opens(reserved, want)
end

local function take_one(number, owner, want)
    local mine, reserved = grant_of(owner), claims and grant_for(run)
    if mine then
        lengthen(mine, lease_ms)
        start_again(owner, want)
        return key.token, mine.slot
    elseif not claims then
        return take(owner, run, lease_ms, want, now)
    end
    claim(reserved, owner, run, lease_ms, want)
    arrive(run, reserved, keep == '1', lease_ms)
    return key.token, reserved.slot
end

if take_free_keys() then
    return granted
end
for number, owner in ipairs(asking) do
    turn_to(number)
    asked[number] = want_in(asked[number])
    look(owner, run)
    -- An earlier copy of this request, whose answer was lost, may have taken it.
    if not grant_of(owner) and is_out_of_reach(asked[number]) then
        return {}
    end
end
for number, owner in ipairs(asking) do
    turn_to(number)
    local token, slot = take_one(number, owner, asked[number])
    if not token then
        return slot
    end
    note(number, token, slot)
end
return granted
