-- due.lua: note in how long keys become due, and tell the ticker if one of them is the first now.
-- KEYS due ticker
-- ARGV noted
-- returns how many were noted
--
-- noted  the names, each with the time in ms, with blanks between
--
-- due     zset    names, by the time (ms) at which somebody may enter there though nobody leaves; with
--                 a half what the ticker has claimed, and looks at just now
-- ticker  string  who is the ticker, and where he hears of a new first one

local DUE, TICKER = KEYS[1], KEYS[2]
local KEPT_MS = 86400000 -- after the last of them, if there is no ticker
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
local who, inbox = string.match(redis.pcall('GET', TICKER) or '', '^(%S+) (%S+)$')
if who and first() < before then
    if string.find(inbox, '{', 1, true) then
        redis.pcall('SPUBLISH', inbox, who)
    else
        redis.pcall('PUBLISH', inbox, who)
    end
end
return noted
