-- dues.lua: report what is due, without changing it.
-- KEYS due ticker
-- returns fields as JSON: ticker, if there is one; many, the number of names; first_ms, after which the
--         first of them is due; negative: it is overdue

local DUE, TICKER = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local leader = redis.pcall('GET', TICKER)
local first = tonumber(redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2] or now_ms)
local process = type(leader) == 'string' and string.match(leader, '^%S+')
local first_ms = math.max(-2 ^ 46, math.min(2 ^ 46, math.floor(first - now_ms))) -- JSON has no infinite numbers
return cjson.encode({ ticker = process, many = redis.call('ZCARD', DUE), first_ms = first_ms })
