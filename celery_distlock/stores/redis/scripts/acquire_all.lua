-- acquire_all.lua: take several keys if all of them are free and nobody waits for any, or if all are
-- kept for the run; else none.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run lease_ms owners [repeated keep wants]
-- returns {token, slot, ...}: granted, as the keys were named | {}: not all of them can be had
--
-- After the first key's records come those of the next, and so on. On a cluster they are in several
-- slots, and the server refuses.
--
-- owners    one for each key, with a blank between
-- repeated  1 if the run's message may have been delivered before: they have to be kept for it
-- keep      1: as in acquire.lua
-- wants     one for each key, as in acquire.lua, with a blank between; empty: all of all
-- USES grant units queue

local run, lease_ms, owners, repeated, keep, wants = unpack(ARGV)
local claims = repeated == '1'

local asking, granted = {}, {}
for owner in string.gmatch(owners, '%S+') do
    asking[#asking + 1] = owner
end

if not claims and not wants then
    local are_free = true
    for number in ipairs(asking) do
        turn_to(number)
        are_free = are_free and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0
    end
    if are_free then
        local now = microseconds()
        for number, owner in ipairs(asking) do
            turn_to(number)
            local token, refused = grant(now, owner, run, lease_ms)
            if not token then
                return refused
            end
            granted[2 * number - 1], granted[2 * number] = token, -1
        end
        return granted
    end
end

local now = microseconds()
local asked = {}
for want in string.gmatch(wants or '', '%S+') do
    asked[#asked + 1] = want
end

-- Whether the key has to be left: what is wanted of it is not kept for the run, or not free.
local function is_out_of_reach(want)
    local units, capacity, terms = want_in(want)
    local second = redis.call('ZSCORE', DONE, run) or redis.call('ZSCORE', DONE, '~' .. run)
    if claims then
        local share = share_of('parked:' .. run)
        local alone = redis.call('HGET', LOCK, 'owner') == 'parked:' .. run
        local enough = share and capacity ~= 1 and needed(units, capacity) <= share.units
        local may_start = starts_in(terms, now) == 0 or keeps_start_for(run)
        return run == '' or second or not (may_start and (enough or (alone and capacity == 1)))
    end
    return redis.call('EXISTS', QUEUE, WOKEN) > 0
        or not admits(units, capacity, now, terms)
        or (run ~= '' and holds(run, now))
end

local mine = {}
for number, owner in ipairs(asking) do
    turn_to(number)
    prune(now)
    local share = redis.call('HGET', LOCK, 'owner') == SHARED and share_of(owner)
    mine[number] = share or redis.call('HGET', LOCK, 'owner') == owner -- by this request, whose answer was lost
    if not mine[number] and is_out_of_reach(asked[number]) then
        return {}
    end
end
for number, owner in ipairs(asking) do
    turn_to(number)
    local units, capacity, terms = want_in(asked[number])
    local share, token, slot = mine[number], redis.call('HGET', LOCK, 'token'), -1
    if share == true then
        lengthen(lease_ms)
    elseif share then
        slot = share.slot
        pass_on(owner, share, owner, share.run, lease_ms, now)
    elseif claims then
        token, slot = claim(now, owner, run, keep == '1', lease_ms, terms)
    else
        token, slot = take(now, owner, run, lease_ms, units, capacity, terms, now)
        if not token then
            return slot
        end
    end
    granted[2 * number - 1], granted[2 * number] = token, slot
end
return granted
