-- vote.lua: give this node's vote for a key to an owner, or say who has it. Repeating it changes
-- nothing.
-- KEYS lock fence done
-- ARGV owner lease_ms run repeated token settle
-- returns {status, time, token, floor, holder, holder_run, ttl_ms}; status: granted | busy | done |
--         unsettled
--
-- One of several independent nodes, a majority of which decides; so there is no queue here.
--
-- repeated  1 if the run's message may have been delivered before
-- token     the token that the owner wishes for. It has it here only if that is above `floor`, the
--           last one that this node knew when it gave its vote; else its token is 0 so far.
-- settle    1: the owner's votes have several tokens, and this one is to be that of all
-- time      this node's, in microseconds

local LOCK, FENCE, DONE = KEYS[1], KEYS[2], KEYS[3]
local owner, lease_ms, run, repeated, token, settle = unpack(ARGV)

local FENCE_MS = 3600000 -- as in grant.lua: a token only has to outlive clocks that differ

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local time = string.format('%.0f', now) -- tostring() would round it

local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run', 'floor')
local holder = held[1]
local reserved = run ~= '' and holder == 'parked:' .. run

if repeated == '1' and holder ~= owner then
    local status, left_ms
    local until_ms = redis.call('ZSCORE', DONE, '~' .. run)
    if redis.call('ZSCORE', DONE, run) then
        status, left_ms = 'done', 0
    elseif until_ms and tonumber(until_ms) > now / 1000 then
        status, left_ms = 'unsettled', math.ceil(tonumber(until_ms) - now / 1000)
    end
    if status then
        if reserved then
            redis.call('DEL', LOCK)
        end
        return { status, time, '0', '0', '', run, left_ms }
    end
end
if holder and holder ~= owner and not reserved then
    return { 'busy', time, held[2], '0', holder, held[3], redis.call('PTTL', LOCK) }
end

local mine, floor = held[2] or '0', held[4]
if not holder then
    floor = redis.call('GET', FENCE)
end
local known = tonumber(floor)
if not (known and known < 2 ^ 53) then
    floor = '0' -- there is none, or it is no token of ours
end
if mine == '0' or settle == '1' then
    mine = '0'
    if tonumber(token) > tonumber(floor) then
        mine = token
        redis.call('SET', FENCE, token, 'PX', FENCE_MS)
    end
end
redis.call('HSET', LOCK, 'owner', owner, 'token', mine, 'run', run, 'floor', floor)
if redis.call('PTTL', LOCK) < tonumber(lease_ms) then
    redis.call('PEXPIRE', LOCK, lease_ms)
end
return { 'granted', time, mine, floor, owner, run, lease_ms }
