-- renew.lua: push the end of a lease that we still hold. Never makes a lock anew.
-- KEYS lock
-- ARGV owner lease_ms
-- returns 1 renewed | 0 held by another | -1 gone

local holder = redis.call('HGET', KEYS[1], 'owner')
if holder == ARGV[1] then
    -- Only ever later: of two renewals on two connections, the shorter may come last.
    if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
        redis.call('PEXPIRE', KEYS[1], ARGV[2])
    end
    return 1
end
if holder == 'several:' then
    local time = redis.call('TIME')
    local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
    local entry = redis.call('HGET', KEYS[1], 'h:' .. ARGV[1]) or ''
    local ends, others = string.match(entry, '^(%d+)( .*)$')
    if not ends or tonumber(ends) <= now_ms then
        return -1
    end
    ends = math.max(tonumber(ends), now_ms + ARGV[2])
    -- First: a full server refuses what begins with HSET.
    redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ends - now_ms))
    redis.call('HSET', KEYS[1], 'h:' .. ARGV[1], string.format('%.0f', ends) .. others)
    return 1
end
return holder and 0 or -1
