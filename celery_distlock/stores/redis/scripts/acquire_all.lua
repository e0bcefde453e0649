-- acquire_all.lua: take several keys if all of them are free and nobody waits for any, or if all are
-- kept for the run; else none.
-- KEYS lock queue tasks woken fence done
-- ARGV run lease_ms owners [repeated keep]
-- returns {token, ...}: granted, as the keys were named | {}: not all of them can be had
--
-- After the first key's records come those of the next, and so on. On a cluster they are in several
-- slots, and the server refuses.
--
-- owners    one for each key, with a blank between
-- repeated  1 if the run's message may have been delivered before: they have to be kept for it
-- keep      as in acquire.lua
--
-- USES grant
local run, lease_ms, owners, repeated, keep = unpack(ARGV)
local claims = repeated == '1'

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
    elseif claims then
        local kept = run ~= '' and held[1] == 'parked:' .. run
        if not kept or redis.call('ZSCORE', DONE, run) or redis.call('ZSCORE', DONE, '~' .. run) then
            return {} -- or the first delivery has ended
        end
    elseif redis.call('EXISTS', LOCK, QUEUE, TASKS) > 0 then
        return {}
    end
end
local now = microseconds()
if not claims then
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
end

-- USES queue
for number, owner in ipairs(asking) do
    turn_to(number)
    if tokens[number] then
        lengthen(lease_ms)
    else
        tokens[number] = claim(now, owner, run, keep, lease_ms)
    end
end
return tokens
