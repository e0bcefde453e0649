-- calls.lua: which run has an identity, so that a call of the same identity is a second one.
-- KEYS lock queue tasks woken fence done rate later calls
--
-- calls  hash  of each identity how long it is taken (started: until its run begins; finished: until
--              it ends; or until a time, ms), perhaps with @ and when its first call came (ms), and
--              its run. Whether it is taken, the other records say:
--              what is written here of a run that is gone means nothing, and is struck some time

local LATER, CALLS = KEYS[8], KEYS[9]
local KNOWN = 'several:' -- the owner of a key that several hold

-- A retry is of the same task.
local function task_of(run)
    return string.match(run, '^(.*):%d+:%d+:%d+$') or run
end

-- Whether a run that is to come later has not come by itself meanwhile, as a message.
local function is_put_off(run)
    local envelope, desk = unpack(redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run))
    return envelope and not desk
end

-- Whether a run, or another attempt of its task, has the key.
local function is_inside(run, now_ms)
    local owner, its_run, own = unpack(redis.call('HMGET', LOCK, 'owner', 'run', 'o:' .. run))
    if owner ~= KNOWN then
        return its_run and task_of(its_run) == task_of(run) and owner ~= 'parked:' .. run
    end
    local entry = own and own ~= 'parked:' .. run and redis.call('HGET', LOCK, 'h:' .. own)
    return entry and (tonumber(string.match(entry, '^(%d+) ')) or 0) > now_ms
end

-- The run by which an entry is taken, and where it is: waiting, coming, running or ended.
local function taken_by(entry, now_ms)
    local until_when, run = string.match(entry or '', '^([^@ ]+)%S* (.*)$')
    if not run then
        return nil
    end
    local is_early = (tonumber(until_when) or 0) > now_ms
    if is_inside(run, now_ms) then
        return (is_early or until_when == 'finished') and run or nil, 'running'
    end
    local held_back = tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0) > now_ms
    local parcel = redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run)
    if parcel[1] and not held_back then
        -- What has come once, and waits again, may come once more as it was then.
        return run, (parcel[2] or redis.call('ZSCORE', WOKEN, run)) and 'coming' or 'waiting'
    end
    return is_early and run or nil, 'ended'
end
