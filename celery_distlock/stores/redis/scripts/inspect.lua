-- inspect.lua: look at a key without changing it.
-- KEYS lock queue tasks woken
-- returns {owner, token, run, ttl_ms, waiting, oldest, woken, task}
--
-- oldest  when the first of those who wait came (µs), 0 if nobody waits
-- woken   how many runs are on their way
-- task    the name of the one that the key is kept for
local LOCK, QUEUE, TASKS, WOKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local held = redis.call('HMGET', LOCK, 'owner', 'token', 'run')
local oldest = redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES')[2]
local woken = redis.call('ZCARD', WOKEN)
local task
if held[3] and held[1] == 'parked:' .. held[3] then
    task = redis.call('HGET', TASKS, 't:' .. held[3])
elseif woken > 0 and held[3] then
    woken = woken - (redis.call('ZSCORE', WOKEN, held[3]) and 1 or 0) -- it has come
end
local ttl_ms, waiting = redis.call('PTTL', LOCK), redis.call('ZCARD', QUEUE)
return { held[1], held[2], held[3], ttl_ms, waiting, oldest or 0, woken, task or '' }
