-- dues.lua: look at what is due, without changing it.
-- KEYS due ticker
-- returns {leader, many, first_ms}: who is the ticker, how many names are noted, and when the first
--         of them is due, from now; less than 0: it has been for so long

local DUE, TICKER = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local leader = redis.pcall('GET', TICKER)
local first = tonumber(redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2] or now_ms)
local who = type(leader) == 'string' and string.match(leader, '^%S+') or ''
return { who, redis.call('ZCARD', DUE), math.floor(first - now_ms) }
