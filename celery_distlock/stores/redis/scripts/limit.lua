-- limit.lua: set or remove an operator's limit, and serve the waiters that it admits.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV capacity until_ms author rates
-- returns 1 | a `reply` (answers.lua) with the runs that are admitted
--
-- capacity  -: as requested; empty: remove the limit
-- until_ms  0: no end
-- rates     see rates.lua; empty: as requested
-- USES records grants limits rates gates runs answers queue

local capacity, until_ms, author, rates = unpack(ARGV)
look('', '')
if capacity == '' then
    redis.call('HDEL', TASKS, 'limit')
else
    local much = rates == '' and capacity or capacity .. '/' .. rates
    redis.call('HSET', TASKS, 'limit', table.concat({ much, until_ms, integer(now), author }, ' '))
end
free()
return answer(1)
