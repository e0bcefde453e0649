-- calls.lua: which run has an identity, so that a call of the same identity is a second one.
-- KEYS lock queue tasks woken fence done rate later calls
--
-- calls  hash  of each identity how long it is taken (started: until its run begins; finished: until
--              it ends; or until a time, ms), perhaps with @ and when its first call came (ms), ! and
--              when the run expires if it has not begun (ms), ~ if its result is not stored, and = if
--              its message is not to be replaced; and its run. Whether it is taken, the other records say:
--              what is written here of a run that is gone means nothing, and is struck some time

local LATER, CALLS = KEYS[8], KEYS[9]
local KNOWN = 'several:' -- the owner of a key that several hold

-- A retry is of the same task.
local function task_of(run)
    return string.match(run, '^(.*):%d+:%d+:%d+$') or run
end

-- Whether a run that is to come later has not come by itself meanwhile, as a message.
local function is_put_off(run)
    local envelope, channel = unpack(redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run))
    return envelope and not channel
end

local function is_alive(share, now_ms)
    return share and (tonumber(string.match(share, '^(%d+) ')) or 0) > now_ms
end

local sharers -- by task, who shares the key for a run of it, and that run; looked at once

local function look_at_sharers(now_ms)
    sharers = {}
    local fields, shares, runs = redis.call('HGETALL', LOCK), {}, {}
    for i = 1, #fields, 2 do
        local kind, name = string.match(fields[i], '^([ho]):(.*)$')
        if kind == 'h' then
            shares[name] = fields[i + 1]
        elseif kind == 'o' then
            runs[name] = fields[i + 1]
        end
    end
    for run, owner in pairs(runs) do
        if is_alive(shares[owner], now_ms) then
            local task = task_of(run)
            sharers[task] = sharers[task] or {}
            table.insert(sharers[task], { owner, run })
        end
    end
end

-- The run that has the key: this one; or, if that is asked for, another attempt of its task.
local function inside(run, now_ms, any_attempt)
    local holder, its_run, owner = unpack(redis.call('HMGET', LOCK, 'owner', 'run', 'o:' .. run))
    if holder ~= KNOWN then
        local is_same = its_run and task_of(its_run) == task_of(run)
        return is_same and holder ~= 'parked:' .. run and its_run or nil
    end
    local own = owner and owner ~= 'parked:' .. run and redis.call('HGET', LOCK, 'h:' .. owner)
    if is_alive(own, now_ms) then
        return run
    elseif not any_attempt then
        return nil
    elseif not sharers then
        look_at_sharers(now_ms) -- all who have it, which may be many
    end
    for _, each in ipairs(sharers[task_of(run)] or {}) do
        if each[1] ~= 'parked:' .. run then
            return each[2]
        end
    end
    return nil
end

-- The run by which an entry is taken, and where it is: waiting, coming, running or ended; when it
-- expires if it has not begun; and the marks of it.
local function taken_by(entry, now_ms)
    -- In two steps, from end to end: else a long entry that somebody else wrote takes quadratic time.
    local head, run = string.match(entry or '', '^(%S+) (.*)$')
    local until_when, terms = string.match(head or '', '^([^@]+)(.*)$')
    if not until_when then
        return nil
    end
    local expires_ms = tonumber(string.match(terms, '!(%d+)') or math.huge)
    local marks = string.match(terms, '^[@!%d]*([~=]*)$') or ''
    local is_early = (tonumber(until_when) or 0) > now_ms
    local lasts = is_early or until_when == 'finished'
    local runs = inside(run, now_ms, lasts)
    if runs and lasts then
        return run, 'running', expires_ms, marks
    elseif runs == run then
        return nil -- it has begun; else its next attempt waits already
    end
    local held_back = tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0) > now_ms
    local envelope, channel = unpack(redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run))
    if envelope and not held_back and expires_ms > now_ms then
        local is_sent = redis.call('ZSCORE', WOKEN, run)
        local stands = is_sent or redis.call('ZSCORE', QUEUE, 'p:' .. run) or redis.call('ZSCORE', LATER, run)
        -- What has come once, and waits again, may come once more as it was then.
        local where = (is_sent or channel) and 'coming' or 'waiting'
        if stands then -- else a server that evicts has its message only, and it never comes
            return run, where, expires_ms, marks
        end
    end
    return is_early and run or nil, 'ended', expires_ms, marks
end

-- Notes that a run has an identity.
local function note_call(identity, run, now_ms, until_when, first, expires_ms, marks)
    local lasts_ms = tonumber(until_when)
    local entry = lasts_ms and integer(now_ms + lasts_ms) or until_when
    if first ~= '' or expires_ms or marks ~= '' then
        entry = entry .. '@' .. first .. (expires_ms and '!' .. integer(now_ms + expires_ms) or '') .. marks
    end
    redis.call('HSET', CALLS, identity, entry .. ' ' .. run)
end
