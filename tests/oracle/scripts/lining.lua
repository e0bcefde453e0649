-- lining.lua: how one who is sent joins the queue, and what becomes of a message that is with the broker.
-- KEYS lock queue tasks woken fence done

local RESEND_MS = 60000 -- after which a message that did not come is sent again; doubles
local RESENDS = 4 -- times; then, for what a broker has lost, once a day
local DAY_MS = 86400000
local COPIES_MS = 31 * DAY_MS -- for which the broker may keep a message; longer than all resends
local PUSHES = 5 -- that no worker took: only the broker gets a run then, and what it was given before

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

-- Notes how often a run was given to the broker, which alone gets it from then on; it stays noted that
-- it has come.
local function note_sent(run, times)
    local noted = has_come(run) and -1 - times or times
    if noted == 0 then
        redis.call('HDEL', TASKS, 'n:' .. run)
    elseif times == 0 then
        redis.call('HSET', TASKS, 'n:' .. run, noted)
    else
        redis.call('HSET', TASKS, 'n:' .. run, noted, 'd:' .. run, PUSHES)
    end
end

-- Whether the broker may have a message of a run: it was given one, or the run's caller gives it one.
local function is_with_broker(run)
    return (tonumber(redis.call('HGET', TASKS, 'd:' .. run) or 0) or 0) >= PUSHES
end

-- Notes that the broker may have another message of a run, which may come after the run's end.
local function expect_copy(run)
    local until_ms = microseconds() / 1000 + COPIES_MS
    redis.pcall('ZADD', DONE, integer(until_ms), '+' .. run)
    redis.call('PEXPIRE', DONE, COPIES_MS)
end
