-- tick.lua: become or remain the ticker, of which there is one at a time, and claim the keys that are due.
-- KEYS due ticker
-- ARGV process inbox for_ms limit settled
-- returns fields as JSON:
--
-- leads     whether the caller is the ticker; missing if another process is, or the caller resigned
-- pause_ms  until the next key is due, or the other ticker's lease ends; missing if none is due
-- late_ms   for how long the first claimed key has been due
-- names     the claimed keys; claim identifies this claim, for `settled`
--
-- for_ms    lease of the ticker; 0: resign
-- limit     the most keys that are claimed, each for CLAIM_MS unless settled
-- settled   an earlier claim and its names, each with the ms until it is due again (-1: not due),
--           separated by spaces; or empty

local DUE, TICKER = KEYS[1], KEYS[2]
local CLAIM_MS = 2000
local LONGEST_MS = 3600000 -- a longer lease was not written by this script
local process, inbox, for_ms, limit, settled = unpack(ARGV)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function integer(number)
    return string.format('%.0f', number)
end

local function settle(claim, names)
    for name, in_ms in string.gmatch(names, '(%S+) (%-?%d+)') do
        local is_claimed = tonumber(redis.call('ZSCORE', DUE, name) or 0) == tonumber(claim)
        if is_claimed and tonumber(in_ms) < 0 then -- else it was noted again since
            redis.call('ZREM', DUE, name)
        elseif is_claimed then
            redis.pcall('ZADD', DUE, integer(now_ms + tonumber(in_ms)), name)
        end
    end
end

-- Returns for how many ms another process is the ticker; nothing if none is.
local function led_by_another()
    local leader = redis.pcall('GET', TICKER)
    local left_ms = redis.call('PTTL', TICKER)
    local is_another = type(leader) == 'string' and string.match(leader, '^%S+') ~= process
    return is_another and left_ms > 0 and left_ms <= LONGEST_MS and left_ms or nil
end

if settled ~= '' then
    settle(string.match(settled, '^(%S+) (.*)$'))
end
local left_ms = led_by_another()
if left_ms then
    return cjson.encode({ pause_ms = left_ms })
end
redis.call('DEL', TICKER) -- first: a full server does not refuse DEL
if for_ms == '0' then
    return '{}'
end
redis.call('SET', TICKER, process .. ' ' .. inbox, 'PX', math.min(for_ms, LONGEST_MS))
local due = redis.call('ZRANGEBYSCORE', DUE, '-inf', integer(now_ms), 'WITHSCORES', 'LIMIT', 0, limit)
local claim = integer(now_ms + CLAIM_MS) .. '.5'
local names = {}
for i = 1, #due, 2 do
    if string.find(due[i], '^%S+$') then
        names[#names + 1] = due[i]
        redis.call('ZADD', DUE, claim, due[i])
    else
        redis.call('ZREM', DUE, due[i]) -- written by another program: it could not be settled
    end
end
-- Bounded: another program may have written an infinite time, which JSON does not have.
local late_ms = due[2] and math.min(LONGEST_MS, math.max(0, math.floor(now_ms - due[2]))) or 0
local next_ms = redis.call('ZRANGE', DUE, 0, 0, 'WITHSCORES')[2]
local pause_ms = next_ms and math.min(LONGEST_MS, math.max(0, math.ceil(next_ms - now_ms))) or nil
return cjson.encode({ leads = true, pause_ms = pause_ms, late_ms = late_ms, claim = claim, names = names })
