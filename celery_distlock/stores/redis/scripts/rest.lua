-- rest.lua: admit no request for some time; holders keep their grants.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner for_ms
-- returns 1 the key rests | 0 the owner has no grant
-- USES records grants limits rates

local owner, for_ms = unpack(ARGV)
-- NEVER REFUSED
look(owner, '')
if not grant_of(owner) then
    return 0
end
key.rest = math.max(key.rest, math.ceil(now_ms) + tonumber(for_ms))
redis.call('HSET', LOCK, 'rest', integer(key.rest))
redis.call('PEXPIRE', LOCK, math.max(redis.call('PTTL', LOCK), math.ceil(key.rest - now_ms)))
return 1
