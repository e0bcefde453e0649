-- downgrade.lua: make an exclusive grant shared, or stop waiting for an upgrade.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner lease_ms
-- returns {'granted', token, slot}: it shares the key | a `reply` (answers.lua): shared, and waiters are
--         served; or with status free: the owner has no grant
-- USES records grants limits rates gates runs answers queue

local owner, lease_ms = unpack(ARGV)
-- NEVER REFUSED
look(owner, '')
local grant = grant_of(owner)
if not grant then
    return reply({ status = 'free' })
end
local token, slot = key.token, grant.slot
if grant.units == 0 then
    token, slot = make_shared(grant, tonumber(lease_ms))
end
if upgrading() == owner then
    redis.call('HDEL', LOCK, 'up')
    key.up = nil
end
hand_on()
return answer_granted(token, slot)
