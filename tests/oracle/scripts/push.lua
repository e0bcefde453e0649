-- push.lua: a woken run is about to be pushed to a worker that has not parked it. If that does not
-- come for its key, the next sweep finds it.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run
-- returns 1 it may be pushed | 0 it has come already | 2 it is for the broker: that was given it, or an
--         earlier one of its key; or no worker took it, again and again
-- USES grant units queue

local BEHIND = 100 -- in the queue, whose channels are looked at
local run = ARGV[1]
if not on_its_way(run) then
    return 0
end
redis.call('ZREM', QUEUE, '') -- a full server refuses a script's first write, but not this one
local known = redis.call('HMGET', TASKS, 'd:' .. run, 'h:' .. run, 's:' .. run, 'q:' .. run)
local pushes, channel = tonumber(known[1] or 0) or 0, known[2]
if pushes >= PUSHES or follows_another(run, known[3], known[4]) then
    return 2
end
if channel and channel ~= '' then
    -- It is gone, or says nothing: what was parked from there after this is not to wait for it.
    redis.pcall('HSET', TASKS, 'h:' .. run, '')
    for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, BEHIND - 1)) do
        local field = 'h:' .. string.sub(member, 3)
        if redis.call('HGET', TASKS, field) == channel then
            redis.pcall('HSET', TASKS, field, '')
        end
    end
end
redis.pcall('HSET', TASKS, 'd:' .. run, pushes + 1)
redis.call('ZADD', WOKEN, 'XX', integer(microseconds() / 1000 + UNSENT_MS), run)
return 1
