-- cancel.lua: strike a parked run that has not come to its key: it will not run, and has no identity.
-- KEYS lock queue tasks woken fence done rate later calls
-- ARGV run
-- returns 1 removed | 0 it is not parked, or has come | as queue.lua's `reply`: removed, and the next
--         has to be sent
-- USES grant units queue calls

local BATCH = 1000 -- identities

local function is_of_task(entry, run)
    local by = string.match(entry or '', '^%S+ (.*)$')
    return by and task_of(by) == task_of(run)
end

-- Has nobody have an identity by what was called as this run, for however long that was to be; it is
-- noted with the run, unless that was parked later.
local function free_identity(run, noted)
    if noted and is_of_task(redis.call('HGET', CALLS, noted), run) then
        redis.call('HDEL', CALLS, noted)
        return
    end
    local cursor, found = '0', nil
    repeat
        cursor, found = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', BATCH))
        for i = 1, #found, 2 do
            if is_of_task(found[i + 1], run) then
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
local noted = redis.call('HGET', TASKS, 'i:' .. run)
local may_come = is_with_broker(run)
if not unpark(run) then
    return 0
end
if may_come then
    expect_copy(run)
end
redis.call('ZREM', LATER, run)
free_identity(run, noted)
record_end(run)
free('parked:' .. run)
return answer(1)
