-- delayed.lua: look at the runs that join a key's queue later, without changing anything.
-- KEYS tasks later
-- ARGV first last
-- returns runs as JSON: those from first to last, without those that have come by themselves; of each
--         run, in_ms, after which it joins the queue, the name of its task, where known, and its want
--         as units.lua has it

local TASKS, LATER = KEYS[1], KEYS[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local LONGEST_MS = 2 ^ 46 -- of a time that is none of ours, too: JSON has no infinite number
local found = {}
local runs = redis.call('ZRANGE', LATER, ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #runs, 2 do
    local run = runs[i]
    local envelope, channel, task, want =
        unpack(redis.call('HMGET', TASKS, 'e:' .. run, 'h:' .. run, 't:' .. run, 'w:p:' .. run))
    local in_ms = math.max(0, math.ceil(tonumber(runs[i + 1]) - now_ms))
    local comes = envelope and not channel -- or it has come by itself
    if comes then
        found[#found + 1] = { run = run, in_ms = math.min(LONGEST_MS, in_ms), task = task, want = want }
    end
end
return cjson.encode({ runs = found })
