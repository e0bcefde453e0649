-- delayed.lua: look at the runs that join a key's queue later, without changing anything.
-- KEYS tasks later
-- ARGV first last
-- returns {run, in_ms, task, want, ...}: those from first to last, who comes first the first, but for
--         who has come by himself meanwhile; in how many ms each joins the queue, its task's name,
--         where known, and its want as units.lua has it

local TASKS, LATER = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local found = {}
local runs = redis.call('ZRANGE', LATER, ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #runs, 2 do
    local run = runs[i]
    local envelope, channel, task, want =
        unpack(redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run, 't:' .. run, 'w:p:' .. run))
    local in_ms = math.max(0, math.ceil(tonumber(runs[i + 1]) - now_ms))
    local comes = envelope and not channel -- or it has come by itself
    for _, each in ipairs(comes and { run, in_ms, task or '', want or '' } or {}) do
        found[#found + 1] = each
    end
end
return found
