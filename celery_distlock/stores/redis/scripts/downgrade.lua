-- downgrade.lua: have one share with any number what it had alone; or wait no more to have it alone.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms
-- returns {'granted', token, slot}: it shares the key | as queue.lua's `reply`: likewise, and the next
--         are let in; or with the status free: it has nothing of the key
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
