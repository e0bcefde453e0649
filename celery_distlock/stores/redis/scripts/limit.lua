-- limit.lua: set an operator's limit, or take it back, and let those in who fit then.
-- KEYS lock queue tasks woken fence done rate
-- ARGV capacity until_ms author rates
-- returns 1 | as queue.lua's `reply`: who is let in
--
-- capacity  -: as many units as are asked with; empty: take the limit back
-- until_ms  0: without an end
-- rates     as rates.lua has them; empty: those that are asked with
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
