-- upgrade.lua: make a shared grant exclusive. Idempotent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV owner lease_ms inbox
-- returns token: granted | a `reply` (answers.lua) with status: busy, and ttl_ms: there are other holders |
--         deadlock: another holder waits for its upgrade | free: the owner has no grant, or has not
--         claimed its reservation
--
-- inbox  where it waits, ahead of the whole queue; empty: it does not wait
-- USES records grants limits rates gates runs answers queue

local owner, lease_ms, inbox = unpack(ARGV)

-- Revokes a grant that is kept for a run: it may wait for another key that the owner holds.
local function give_back_kept()
    local kept = key.kept and grant_for(key.kept)
    if kept and kept.stage == KEPT then
        step_back(kept)
    end
end

look(owner, '')
local grant = grant_of(owner)
local is_claimed = grant and grant.stage ~= RESERVED
if not is_claimed then
    return reply({ status = 'free' })
elseif grant.units == 0 then
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
