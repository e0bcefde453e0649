-- rest.lua: let nobody enter for a while; those who have the key go on.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner for_ms
-- returns 1 it rests | 0 the owner has nothing of it
-- USES grant units

local owner, for_ms = unpack(ARGV)
local now = microseconds()
prune(now)
local holder, rest = unpack(redis.call('HMGET', LOCK, 'owner', 'rest'))
if holder ~= owner and not (holder == SHARED and share_of(owner)) then
    return 0
end
local ends = math.max(tonumber(rest or 0) or 0, math.ceil(now / 1000) + tonumber(for_ms))
begin_to_write()
redis.call('HSET', LOCK, 'rest', integer(ends))
outlive(ends, now) -- also of one who has it alone: nobody enters when his lease ends before
return 1
