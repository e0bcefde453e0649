-- calls.lua: which run has an identity, so that a call of the same identity is a second one.
-- KEYS lock queue tasks woken fence done rate later calls
--
-- calls  hash  of each identity how long it is taken (started: until its run begins; finished: until
--              it ends; or until a time, ms), perhaps with @ and when its first call came (ms), ! and
--              when the run expires if it has not begun (ms), ~ if its result is not stored, and = if
--              its message is not to be replaced; and its run. Whether it is taken, the other records say:
--              what is written here of a run that is gone means nothing, and is struck some time
-- USES records grants runs

local LATER, CALLS = KEYS[8], KEYS[9]

-- The run that has the key: this one; or, if that is asked for, another attempt of its task.
local function inside(run, any_attempt)
    if key.alone then
        local its_run = key.alone.ends > now_ms and key.alone.run or ''
        local is_same = its_run ~= '' and task_of(its_run) == task_of(run)
        return is_same and key.alone.owner ~= reserved_owner(run) and its_run or nil
    elseif held_by(run) then
        return run
    elseif not any_attempt or key.count == 0 then
        return nil
    end
    local other = last_attempt(task_of(run))
    return other and other ~= run and (held_by(other) or grant_for(other)) and other or nil
end

-- Whether a run that has an entry waits, or is on its way.
local function is_there(run, of)
    local _, settles = ends_of(run)
    if settles and settles > now_ms then
        return false
    end
    -- Else a server that evicts has its message only, and it never comes.
    return redis.call('ZSCORE', WOKEN, run) or redis.call('ZSCORE', QUEUE, 'p:' .. run) or redis.call('ZSCORE', LATER, run)
end

-- The run by which an entry is taken, and where it is: waiting, coming, running or ended; when it
-- expires if it has not begun; and the marks of it.
local function taken_by(entry)
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
    local runs = inside(run, lasts)
    if runs and lasts then
        return run, 'running', expires_ms, marks
    elseif runs == run then
        return nil -- it has begun; else its next attempt waits already
    end
    local of = record(run)
    if of and expires_ms > now_ms and is_there(run, of) then
        -- What has come once, and waits again, may come once more as it was then.
        return run, (is_in_woken[of.s] or of.h) and 'coming' or 'waiting', expires_ms, marks
    end
    return is_early and run or nil, 'ended', expires_ms, marks
end

-- Notes that a run has an identity.
local function note_call(identity, run, until_when, first, expires_ms, marks)
    local lasts_ms = tonumber(until_when)
    local entry = lasts_ms and integer(now_ms + lasts_ms) or until_when
    if first ~= '' or expires_ms or marks ~= '' then
        entry = entry .. '@' .. first .. (expires_ms and '!' .. integer(now_ms + expires_ms) or '') .. marks
    end
    redis.call('HSET', CALLS, identity, entry .. ' ' .. run)
end
