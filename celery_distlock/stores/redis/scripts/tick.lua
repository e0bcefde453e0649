-- tick.lua: be the ticker, or go on being it, and claim the keys that are due; nobody else is it then.
-- KEYS due ticker
-- ARGV who inbox for_ms limit settled
-- returns fields as JSON:
--
-- leads     whether the caller is the ticker; false if another process is, or the caller has resigned
-- pause_ms  until the next key is due, or the other ticker's time ends; missing if none is due
-- late_ms   for how long the first of the claimed has been due
-- names     those that are claimed; claim names this claim, for `settled`
--
-- for_ms    how long one is the ticker without saying so again; 0: not any more
-- limit     how many are claimed at most; for CLAIM_MS, if they are not settled
-- settled   an earlier claim, its names, each with the time in ms in which it is due again (-1: it
--           is not), with blanks between; or empty

local DUE, TICKER = KEYS[1], KEYS[2]
local CLAIM_MS = 2000
local LONGEST_MS = 3600000 -- what is longer, or for ever, is not of ours
local who, inbox, for_ms, limit, settled = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function integer(number)
    return string.format('%.0f', number)
end

local function settle(claim, names)
    for name, in_ms in string.gmatch(names, '(%S+) (%-?%d+)') do
        local is_claimed = tonumber(redis.call('ZSCORE', DUE, name) or 0) == tonumber(claim)
        if is_claimed and tonumber(in_ms) < 0 then -- else somebody has noted it anew
            redis.call('ZREM', DUE, name)
        elseif is_claimed then
            redis.pcall('ZADD', DUE, integer(now_ms + tonumber(in_ms)), name)
        end
    end
end

-- Until when (ms from now) somebody else is the ticker; nothing: nobody is.
local function led_by_another()
    local leader = redis.pcall('GET', TICKER)
    local left_ms = redis.call('PTTL', TICKER)
    local is_another = type(leader) == 'string' and string.match(leader, '^%S+') ~= who
    return is_another and left_ms > 0 and left_ms <= LONGEST_MS and left_ms or nil
end

if settled ~= '' then
    settle(string.match(settled, '^(%S+) (.*)$'))
end
local left_ms = led_by_another()
if left_ms then
    return cjson.encode({ pause_ms = left_ms })
end
redis.call('DEL', TICKER) -- a full server refuses a script's first write, but not this one
if for_ms == '0' then
    return '{}'
end
redis.call('SET', TICKER, who .. ' ' .. inbox, 'PX', math.min(for_ms, LONGEST_MS))
local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', integer(now_ms), 'WITHSCORES', 'LIMIT', 0, limit)
local claim = integer(now_ms + CLAIM_MS) .. '.5'
local names = {}
for i = 1, #due, 2 do
    if string.find(due[i], '^%S+$') then
        names[#names + 1] = due[i]
        redis.call('ZADD', DUE, claim, due[i])
    else
        redis.call('ZREM', DUE, due[i]) -- none of ours: it could not be settled
    end
end
-- Others may have noted an infinite time, which JSON has none of.
local late_ms = due[2] and math.min(LONGEST_MS, math.max(0, math.floor(now_ms - due[2]))) or 0
local next_ms = redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2]
local pause_ms = next_ms and math.min(LONGEST_MS, math.max(0, math.ceil(next_ms - now_ms))) or nil
return cjson.encode({ leads = true, pause_ms = pause_ms, late_ms = late_ms, claim = claim, names = names })
