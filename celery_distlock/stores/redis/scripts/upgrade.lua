-- upgrade.lua: give one who shares the key all of it. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner lease_ms inbox
-- returns token: granted | as queue.lua's `reply`, with status: busy, and ttl_ms: others have it as
--         well | deadlock: another one waits for the same | free: it has nothing of the key
--
-- inbox  where it waits, before all that queue; empty: it does not
-- USES records grants limits rates gates runs answers queue

local owner, lease_ms, inbox = unpack(ARGV)

-- Takes back what is kept for a run that waits elsewhere, perhaps for a key that the owner has.
local function give_back_kept()
    local kept = key.kept and grant_for(key.kept)
    if kept and kept.stage == KEPT then
        step_back(kept)
    end
end

look(owner, '')
local grant = grant_of(owner)
if not grant then
    return reply({ status = 'free' })
elseif grant.units == 0 then
    grant.stage, grant.place = HELD, 0
    lengthen(grant, tonumber(lease_ms))
    return key.token
end
give_back_kept()
if key.count == 1 then
    return make_alone(grant, tonumber(lease_ms))
elseif key.up and upgrading() ~= owner then
    return reply({ status = 'deadlock' })
end
if inbox ~= '' then
    redis.call('HSET', LOCK, 'up', inbox .. ' ' .. owner)
end
return reply({ status = 'busy', ttl_ms = redis.call('PTTL', LOCK) })
