-- cancel.lua: remove a run that has not claimed its key, and free its identity.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV run
-- returns 1 removed | 0 it is not known, holds its key, or is being stored | a `reply` (answers.lua):
--         removed, and waiters are served; or with route: its envelope is at the first key of that route
-- USES records grants limits rates gates runs answers queue calls

local BATCH_OF_CALLS = 1000 -- identities

local function is_of_task(entry, run)
    local by = string.match(entry or '', '^%S+ (.*)$')
    return by and task_of(by) == task_of(run)
end

-- Frees the identity of a run's task. The run's record names it, unless the run was parked again later.
local function free_identity(run, noted)
    if noted and is_of_task(redis.call('HGET', CALLS, noted), run) then
        redis.call('HDEL', CALLS, noted)
        return
    end
    local cursor, found = '0', nil
    repeat
        cursor, found = unpack(redis.call('HSCAN', CALLS, cursor, 'COUNT', BATCH_OF_CALLS))
        for i = 1, #found, 2 do
            if is_of_task(found[i + 1], run) then
                redis.call('HDEL', CALLS, found[i])
            end
        end
    until cursor == '0'
end

local run = ARGV[1]
-- NEVER REFUSED
look('', run)
local _, settles = ends_of(run)
fetch('turn', 'r:' .. run)
local of = record(run)
if of and of.b then
    return reply({ route = of.k })
end
if held_by(run) or settles or not of then
    return 0 -- it runs, or its result is being stored
end
if is_with_broker(of) then
    expect_copy(run)
end
forget_run(run)
redis.call('ZREM', LATER, run)
free_identity(run, of.i)
record_end(run)
free(grant_for(run))
if of.k then
    note_route(run, of) -- for its other keys
end
return answer(1)
