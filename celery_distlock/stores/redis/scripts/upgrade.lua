-- upgrade.lua: give one who shares the key all of it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms inbox
-- returns token: granted | as queue.lua's `reply`, with status: busy, and ttl_ms: others have it as
--         well | deadlock: another one waits for the same | free: it has nothing of the key
--
-- inbox  where it waits, before all that queue; empty: it does not
-- USES records grants limits rates gates runs answers queue

local owner, lease_ms, inbox = unpack(ARGV)
look(owner, '')
local grant = grant_of(owner)
if not grant then
    return reply({ status = 'free' })
elseif grant.units == 0 then
    grant.stage, grant.place = HELD, 0
    lengthen(grant, tonumber(lease_ms))
    return key.token
elseif key.count == 1 then
    return make_alone(grant, tonumber(lease_ms))
elseif key.up and upgrading() ~= owner then
    return reply({ status = 'deadlock' })
end
if inbox ~= '' then
    redis.call('HSET', LOCK, 'up', inbox .. ' ' .. owner)
end
return reply({ status = 'busy', ttl_ms = redis.call('PTTL', LOCK) })
