-- acquire_all.lua: take several keys if all of them are free and nobody waits for any, else none.
-- KEYS lock queue tasks woken fence done
-- ARGV run lease_ms owners
-- returns {token, ...}: granted, as the keys were named | {}: not all of them are free
--
-- After the first key's records come those of the next, and so on. On a cluster they are in several
-- slots, and the server refuses.
--
-- owners  one for each key, with a blank between
--
-- USES grant
local run, lease_ms, owners = unpack(ARGV)

local tokens = {}
local asking = {}
for owner in string.gmatch(owners, '%S+') do
    asking[#asking + 1] = owner
end

for number, owner in ipairs(asking) do
    turn_to(number)
    local held = redis.call('HMGET', LOCK, 'owner', 'token')
    if held[1] == owner then
        tokens[number] = held[2] or '' -- by this request, whose answer was lost
    elseif redis.call('EXISTS', LOCK, QUEUE, TASKS) > 0 then
        return {}
    end
end
local now = microseconds()
for number, owner in ipairs(asking) do
    turn_to(number)
    if tokens[number] then
        lengthen(lease_ms)
    else
        local token, refused = grant(now, owner, run, lease_ms)
        if not token then
            return refused
        end
        tokens[number] = token
    end
end
return tokens
