-- act.lua: record an operator's action on a key; keeps the last few, for some time.
-- KEYS lock actions
-- ARGV entry owners
-- returns 1 recorded | 0 none of the owners holds the key
--
-- entry   the action, its author and reason, as actions.py writes them; no two are equal
-- owners  owners that lose the key, separated by spaces; empty: none
--
-- actions  zset  entries, each as its time (µs), a space and the entry, by that time

local MOST = 10 -- entries of a key
local KEPT_MS = 30 * 86400000 -- after the last one

local entry, owners = unpack(ARGV)
local is_due = owners == ''
local alone = redis.call('HGET', KEYS[1], 'x') or '' -- as in grants.lua
for owner in string.gmatch(owners, '%S+') do
    is_due = is_due or string.find(alone, ' ' .. #owner .. ' ' .. owner, 1, true) ~= nil
    is_due = is_due or redis.call('HEXISTS', KEYS[1], 'g:' .. owner) == 1
end
if not is_due then
    return 0
end
for _, known in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
    if string.match(known, '^%d+ (.*)$') == entry then
        return 1 -- a repeated request, whose first answer was lost
    end
end
local time = redis.call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
redis.call('ZADD', KEYS[2], now, now .. ' ' .. entry)
for _, old in ipairs(redis.call('ZRANGE', KEYS[2], 0, -MOST - 1)) do
    redis.call('ZREM', KEYS[2], old)
end
redis.call('PEXPIRE', KEYS[2], KEPT_MS)
return 1
