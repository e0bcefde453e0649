-- renew.lua: push the end of a lease that we still hold. Never makes a lock anew.
-- KEYS lock
-- ARGV owner lease_ms
-- returns 1 renewed | 0 held by somebody else | -1 gone
local holder = redis.call('HGET', KEYS[1], 'owner')
if holder == ARGV[1] then
    -- Only ever later: of two renewals on two connections, the shorter may come last.
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    return 1
end
if holder then
    return 0
end
return -1
