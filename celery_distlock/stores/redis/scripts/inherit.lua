-- inherit.lua: pass an identity from an earlier execution of a task on to this run.
-- KEYS lock queue tasks woken fence done rate lanes later calls
-- ARGV identity run until_when expires_ms marks
-- returns 1 | 0: another task has it
--
-- The arguments are those of send.lua.
-- USES records grants runs calls

local identity, run, until_when, expires_ms, marks = unpack(ARGV)
read_clock()
load('', run)
local entry = redis.call('HGET', CALLS, identity)
local terms, before = string.match(entry or '', '^(%S+) (.*)$')
if before and task_of(before) == task_of(run) then
    redis.call('HSET', CALLS, identity, terms .. ' ' .. run)
    return 1
elseif taken_by(entry) then
    return 0
end
note_call(identity, run, until_when, '', tonumber(expires_ms), marks) -- the entry was removed
return 1
