-- downgrade.lua: have one share with any number what it had alone; or wait no more to have it alone.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms
-- returns {'free'}: it has nothing of the key | {'granted', token, slot, wake_run, wake_envelope,
--         ...}: it shares it
-- USES grant units queue

local owner, lease_ms = unpack(ARGV)
local now = microseconds()
prune(now)
local fields = { 'owner', 'token', 'run', 'again', 'rest', 'up', 'was', 'start:' .. owner }
local held = redis.call('HMGET', LOCK, unpack(fields))
local slot = -1
if held[1] == owner then
    local left_ms = math.max(redis.call('PTTL', LOCK), tonumber(lease_ms))
    redis.call('DEL', LOCK)
    local units, its_slot, of = string.match(held[7] or '', '^(%d+) (%-?%d+) (%d+)$')
    held[2], slot = admit(now, owner, held[3], left_ms, tonumber(units or 1), 0, 0)
    if units then -- it has what it had before it was alone
        local share = share_of(owner)
        share.units, share.slot = tonumber(units), tonumber(its_slot)
        slot = share.slot
        write_share(owner, share)
        local slots = marked('', slot, '1')
        redis.call('HSET', LOCK, 'used', units, 'slots', slots, 'capacity', of)
    end
    if held[4] then
        redis.call('HSET', LOCK, 'again:' .. held[3], held[4])
    end
    if held[5] then
        redis.call('HSET', LOCK, 'rest', held[5])
        outlive_rest(now)
    end
    if held[8] then
        redis.call('HSET', LOCK, 'start:' .. owner, held[8])
    end
elseif held[1] ~= SHARED or not share_of(owner) then
    return { 'free' }
else
    slot = share_of(owner).slot
end
if upgrading(held[6]) == owner then
    redis.call('HDEL', LOCK, 'up')
end
local _, wake_run, wake_envelope = hand_on(now, '', 0)
return { 'granted', held[2], slot, wake_run, wake_envelope, unpack(also) }
