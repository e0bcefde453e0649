-- due.lua: note when keys are due, and notify the ticker if one of them is now the first.
-- KEYS due ticker
-- ARGV noted
-- returns how many were noted
--
-- noted  names, each with the time in ms, separated by spaces
--
-- due     zset    names, by the time (ms) when a waiter may be admitted without a release; with .5 if the
--                 ticker has claimed them
-- ticker  string  the ticker's process, and the inbox where it is notified

local DUE, TICKER = KEYS[1], KEYS[2]
local KEPT_MS = 86400000 -- after the last of them, if no ticker runs
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function first()
    return tonumber(redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2] or math.huge)
end

local before, noted = first(), 0
local left_ms = math.max(0, redis.call('PTTL', DUE))
for name, in_ms in string.gmatch(ARGV[1], '(%S+) (%d+)') do
    local at = now_ms + tonumber(in_ms)
    local known = tonumber(redis.call('ZSCORE', DUE, name) or math.huge)
    if at < known or known % 1 ~= 0 then
        local added = redis.pcall('ZADD', DUE, string.format('%.0f', at), name)
        if type(added) == 'table' then
            break -- the server is full: a sweep finds it
        end
        left_ms = math.max(left_ms, in_ms + KEPT_MS)
        noted = noted + 1
    end
end
if noted > 0 then
    redis.call('PEXPIRE', DUE, left_ms)
end
local process, inbox = string.match(redis.pcall('GET', TICKER) or '', '^(%S+) (%S+)$')
if process and first() < before then
    if string.find(inbox, '{', 1, true) then
        redis.pcall('SPUBLISH', inbox, process)
    else
        redis.pcall('PUBLISH', inbox, process)
    end
end
return noted
