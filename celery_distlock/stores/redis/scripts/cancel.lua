-- cancel.lua: strike a parked run that has not come to its key: it will not run, and has no identity.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV run
-- returns 1 struck | 0 it is not parked, or has come | {wake_run, wake_envelope}: struck, and the
--         next is to be sent
-- USES grant units queue calls

local BATCH = 1000 -- identities

-- Has nobody have an identity by what was called as this run, for however long that was to be.
local function free_identity(run)
    local cursor, found = '0', nil
    repeat
        cursor, found = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', BATCH))
        for i = 1, #found, 2 do
            local by = string.match(found[i + 1], '^%S+ (.*)$')
            if by and task_of(by) == task_of(run) then
                redis.call('HDEL', CALLS, found[i])
            end
        end
    until cursor == '0'
end

local run = ARGV[1]
local now = microseconds()
prune(now)
if holds(run, now) or redis.call('ZSCORE', DONE, '~' .. run) then
    return 0 -- it runs, or its result is being stored
end
if not unpark(run) then
    return 0
end
redis.call('ZREM', LATER, run)
free_identity(run)
record_end(run)
return free('parked:' .. run)
