-- calls.lua: which run has an identity, so that a call of the same identity is a second one.
-- KEYS lock queue tasks woken fence done rate later calls
--
-- calls  hash  of each identity how long it is taken (started: until its run begins; finished: until
--              it ends; or until a time, ms), perhaps with @ and when its first call came (ms), ! and
--              when the run expires if it has not begun (ms), and ~ if its result is not stored; and
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

local sharers -- by task, who shares the key for a run of it, and that run; looked at once

local function look_at_sharers(now_ms)
    sharers = {}
    local fields = redis.call('HGETALL', LOCK)
    for i = 1, #fields, 2 do
        local run, owner = string.match(fields[i], '^o:(.*)$'), fields[i + 1]
        local share = run and redis.call('HGET', LOCK, 'h:' .. owner)
        if share and (tonumber(string.match(share, '^(%d+) ')) or 0) > now_ms then
            local task = task_of(run)
            sharers[task] = sharers[task] or {}
            table.insert(sharers[task], { owner, run })
        end
    end
end

-- The run that has the key: this one, or another attempt of its task; or nothing.
local function inside(run, now_ms)
    local holder, its_run = unpack(redis.call('HMGET', LOCK, 'owner', 'run'))
    if holder ~= KNOWN then
        local is_same = its_run and task_of(its_run) == task_of(run)
        return is_same and holder ~= 'parked:' .. run and its_run or nil
    elseif not sharers then
        look_at_sharers(now_ms)
    end
    local found
    for _, each in ipairs(sharers[task_of(run)] or {}) do
        if each[1] ~= 'parked:' .. run and found ~= run then
            found = each[2]
        end
    end
    return found
end

-- The run by which an entry is taken, and where it is: waiting, coming, running or ended; when it
-- expires if it has not begun; and whether its result is not stored.
local function taken_by(entry, now_ms)
    local until_when, terms, run = string.match(entry or '', '^([^@ ]+)(%S*) (.*)$')
    if not run then
        return nil
    end
    local expires_ms = tonumber(string.match(terms, '!(%d+)') or math.huge)
    local is_silent = string.find(terms, '~', 1, true) ~= nil
    local is_early = (tonumber(until_when) or 0) > now_ms
    local runs = inside(run, now_ms)
    if runs and (is_early or until_when == 'finished') then
        return run, 'running', expires_ms, is_silent
    elseif runs == run then
        return nil -- it has begun; else its next attempt waits already
    end
    local held_back = tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0) > now_ms
    local parcel = redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run)
    if parcel[1] and not held_back and expires_ms > now_ms then
        -- What has come once, and waits again, may come once more as it was then.
        local comes = parcel[2] or redis.call('ZSCORE', WOKEN, run)
        return run, comes and 'coming' or 'waiting', expires_ms, is_silent
    end
    return is_early and run or nil, 'ended', expires_ms, is_silent
end
