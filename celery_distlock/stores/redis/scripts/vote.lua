-- vote.lua: give this node's vote for a key to an owner, or report its holder. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner lease_ms run repeated token settle
-- returns {status, time, token, floor, holder, holder_run, ttl_ms}; status: granted | busy | done |
--         unsettled
--
-- For a majority of independent nodes, so there is no queue.
--
-- repeated  1 if the run's message may have been delivered before
-- token     the token that the owner proposes. It is accepted only above `floor`, the last token that this
--           node knew when it voted; otherwise the token is 0 for now
-- settle    1: the owner's votes have different tokens, and this one replaces them
-- time      of this node (µs)
--
-- lock   floor: the last token that was known at the time of the vote; for the rest see grants.lua
-- USES records grants runs

local owner, lease_ms, run, repeated, token, settle = unpack(ARGV)

-- Answers a second delivery if the first one has ended, or if its result is being stored.
local function answer_ended(reserved)
    local ended, settles = ends_of(run)
    local left_ms = settles and math.ceil(settles - now_ms) or 0
    if not ended and left_ms <= 0 then
        return nil
    elseif reserved then
        vacate(reserved)
    end
    return { ended and 'done' or 'unsettled', integer(now), '0', '0', '', run, ended and 0 or left_ms }
end

-- Returns the last token that was known before the owner got this vote.
local function floor_of(alone)
    local floor = alone and redis.call('HGET', LOCK, 'floor')
    if not alone then
        floor = redis.call('GET', FENCE)
    end
    local known = tonumber(floor or nil)
    return known and known < EXACT and floor or '0' -- missing, or written by another program
end

-- Returns the owner's token at this node: the proposed one if it is above the floor.
local function token_above(floor, before)
    if before ~= '0' and settle ~= '1' then
        return before
    elseif tonumber(token) <= tonumber(floor) then
        return '0'
    end
    redis.call('SET', FENCE, token, 'PX', FENCE_MS)
    return token
end

local function give_vote(alone)
    local floor = floor_of(alone)
    local mine = token_above(floor, alone and key.token or '0')
    local grant = alone or { units = 0, slot = -1, flags = '', place = 0, since = clock, ends = 0 }
    grant.owner, grant.run, grant.stage = owner, run, HELD
    grant.ends = math.max(grant.ends, math.ceil(now_ms) + lease_ms)
    redis.call('HSET', LOCK, 'x', row_of(grant), 'token', mine, 'floor', floor)
    redis.call('PEXPIRE', LOCK, math.ceil(grant.ends - now_ms))
    return { 'granted', integer(now), mine, floor, owner, run, lease_ms }
end

lease_ms = tonumber(lease_ms)
look(owner, run)
local mine, reserved = grant_of(owner), grant_for(run)
local result = repeated == '1' and not mine and answer_ended(reserved)
if result then
    return result
elseif key.alone and not (mine or reserved) then
    local left_ms = math.floor(key.alone.ends - now_ms)
    return { 'busy', integer(now), key.token or false, '0', key.alone.owner, key.alone.run, left_ms }
end
return give_vote(key.alone)
