-- inspect.lua: look at a key without changing it.
-- KEYS lock queue
-- returns {owner, token, run, ttl_ms, waiting}
local lock = redis.call('HMGET', KEYS[1], 'owner', 'token', 'run')
return { lock[1], lock[2], lock[3], redis.call('PTTL', KEYS[1]), redis.call('ZCARD', KEYS[2]) }
