-- renew.lua: extend a lease. Never grants anything.
-- KEYS lock
-- ARGV owner lease_ms
-- returns 1 renewed | 2 renewed, and the owner is asked to leave | 0 another owner has the key | -1 no grant
--
-- For the format of grants see grants.lua.

local owner, lease_ms = ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local alone, shared = unpack(redis.call('HMGET', KEYS[1], 'x', 'g:' .. owner))
local name, row = alone and 'x' or 'g:' .. owner, alone or shared
local ends, others, flags, length, rest =
    string.match(row or '', '^(%d+)( %d+ %-?%d+ %a(%w*) %d+ %d+ (%d+) (.*))$')
if not ends or tonumber(ends) <= now_ms then
    return -1
elseif string.sub(rest, 1, tonumber(length)) ~= owner then
    return 0
end
-- Never shorten: of two renewals on two connections, the shorter may arrive last.
ends = math.max(tonumber(ends), now_ms + 1 + lease_ms)
-- First: a full server refuses a script that begins with HSET.
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(redis.call('PTTL', KEYS[1]), ends - now_ms)))
redis.call('HSET', KEYS[1], name, string.format('%.0f', ends) .. others)
return string.find(flags, 'c', 1, true) and 2 or 1
