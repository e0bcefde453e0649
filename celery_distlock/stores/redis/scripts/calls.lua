-- calls.lua: which run has an identity, so that another call with it is recognised as a duplicate.
-- KEYS lock queue tasks woken fence done rate lanes later calls
--
-- calls  hash  for each identity: how long it is taken (started: until its run begins; finished: until
--              the run ends; or a time, ms); optionally @ and the time of its first call (ms), ! and when
--              the run expires if it has not begun (ms), the marks ~: its result is not stored, and =:
--              its message must not be replaced, and *: a newer call asks it to leave; then the run. The
--              other records decide whether it is taken: an entry of a run that is gone is obsolete, and
--              the sweep removes it
-- USES records grants runs

local LATER, CALLS = KEYS[9], KEYS[10]

-- Returns the run if it holds the key; with `any_attempt`, also another attempt of its task.
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

-- Whether a run with a record waits or is in flight.
local function is_there(run, of)
    if tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0) > now_ms then
        return false -- its result is being stored
    end
    -- If it has no place, the server has evicted its queue, and it never runs.
    return redis.call('ZSCORE', QUEUE, 'p:' .. run) or redis.call('ZSCORE', WOKEN, run) or redis.call('ZSCORE', LATER, run)
end

-- Returns the run that has the identity of an entry; where it is: waiting, coming, running or ended; when
-- it expires if it has not begun; and its marks. Returns nothing if the identity is free.
local function taken_by(entry)
    -- Two anchored matches: a long entry from another program must not take quadratic time.
    local head, run = string.match(entry or '', '^(%S+) (.*)$')
    local until_when, terms = string.match(head or '', '^([^@]+)(.*)$')
    if not until_when then
        return nil
    end
    local expires_ms = tonumber(string.match(terms, '!(%d+)') or math.huge)
    local marks = string.match(terms, '^[@!%d]*([~=*]*)$') or ''
    local is_early = (tonumber(until_when) or 0) > now_ms
    local lasts = is_early or until_when == 'finished'
    local runs = inside(run, lasts)
    if runs and lasts then
        return run, 'running', expires_ms, marks
    elseif runs == run then
        return nil -- it has begun, and its identity lasted until then
    end
    local of = record(run)
    if of and expires_ms > now_ms and is_there(run, of) then
        -- A run that was delivered once may be delivered again with its old message.
        return run, (is_in_woken(of.s) or of.h) and 'coming' or 'waiting', expires_ms, marks
    end
    return is_early and run or nil, 'ended', expires_ms, marks
end

-- Whether an identity is free, and a newer call with it still asks its last run to leave.
local function may_recall(entry)
    local head, run = string.match(entry, '^(%S+) (.*)$')
    return head and string.find(head, '*', 1, true) and inside(run, true) ~= nil
end

-- Assigns an identity to a run.
local function note_call(identity, run, until_when, first, expires_ms, marks)
    local lasts_ms = tonumber(until_when)
    local entry = lasts_ms and integer(now_ms + lasts_ms) or until_when
    if first ~= '' or expires_ms or marks ~= '' then
        entry = entry .. '@' .. first .. (expires_ms and '!' .. integer(now_ms + expires_ms) or '') .. marks
    end
    redis.call('HSET', CALLS, identity, entry .. ' ' .. run)
end
