-- inherit.lua: a run has the identity that an earlier execution of its task has.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV identity run
-- returns 1 | 0: no execution of its task had it
-- USES grant calls

local identity, run = unpack(ARGV)
local terms, before = string.match(redis.call('HGET', CALLS, identity) or '', '^(%S+) (.*)$')
if not before or task_of(before) ~= task_of(run) then
    return 0
end
redis.call('HSET', CALLS, identity, terms .. ' ' .. run)
return 1
