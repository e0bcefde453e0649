-- lining.lua: how one who is sent joins the queue, and what becomes of a message that is with the broker.
-- KEYS lock queue tasks woken fence done

local RESEND_MS = 60000 -- after which a message that did not come is sent again; doubles
local RESENDS = 4 -- times; then, for what a broker has lost, once a day
local DAY_MS = 86400000

-- Puts a run that comes now at the end of the queue.
local function line_up(now, run)
    local last = redis.call('ZRANGE', QUEUE, -1, -1, 'WITHSCORES')[2]
    local stands = integer(math.max(now, tonumber(last or '0') + 1))
    redis.call('HSET', TASKS, 's:' .. run, stands)
    redis.call('ZADD', QUEUE, stands, 'p:' .. run)
end

-- How often a run's message was given to the broker since it was parked last.
local function times_sent(run)
    local noted = tonumber(redis.call('HGET', TASKS, 'n:' .. run) or 0) or 0
    return math.max(0, noted, -1 - noted)
end

-- Whether a run that is parked has come for its key since, so that it may have begun.
local function has_come(run)
    return (tonumber(redis.call('HGET', TASKS, 'n:' .. run) or 0) or 0) < 0
end

-- Notes how often a run was given to the broker; it stays noted that it has come.
local function note_sent(run, times)
    local noted = has_come(run) and -1 - times or times
    if noted == 0 then
        redis.call('HDEL', TASKS, 'n:' .. run)
    else
        redis.call('HSET', TASKS, 'n:' .. run, noted)
    end
end
