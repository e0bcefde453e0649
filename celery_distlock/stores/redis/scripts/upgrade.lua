-- upgrade.lua: give one who shares the key all of it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms inbox
-- returns token: granted | as queue.lua's `reply`, with status: busy, and ttl_ms: others have it as
--         well | deadlock: another one waits for the same | free: it has nothing of the key
--
-- inbox  where it waits, before all that queue; empty: it does not
-- USES grant units queue

local owner, lease_ms, inbox = unpack(ARGV)
local now = microseconds()
prune(now)
local holder, token, up, holders = unpack(redis.call('HMGET', LOCK, 'owner', 'token', 'up', 'holders'))
if holder == owner then
    lengthen(lease_ms)
    redis.call('HDEL', LOCK, 'due')
    return token
end
if holder ~= SHARED or not share_of(owner) then
    return reply({ status = 'free' })
end
if holders == '1' then
    return convert(now, owner, lease_ms)
end
if up and upgrading(up) ~= owner then
    return reply({ status = 'deadlock' })
end
if inbox ~= '' then
    redis.call('HSET', LOCK, 'up', inbox .. ' ' .. owner)
end
return reply({ status = 'busy', ttl_ms = redis.call('PTTL', LOCK) })
