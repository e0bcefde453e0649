-- waiters.lua: look at those who wait for a key, without changing anything.
-- KEYS lock queue tasks woken
-- ARGV first last
-- returns as JSON woken, the runs on their way, from number first to last of them, and queue, from
--         place first to last: of each its run, or as `blocked` inbox and owner; since
--         (µs), task, the name of a parked run's, where known, and its want as units.lua has it

local LOCK, QUEUE, TASKS, WOKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local found = { woken = {}, queue = {} }
local function add(list, member, run, since)
    local task = run and redis.call('HGET', TASKS, 't:' .. run)
    local want = redis.call('HGET', TASKS, 'w:' .. member)
    local blocked = not run and string.match(member, '^b:(.*)$')
    list[#list + 1] = { run = run, blocked = blocked, since = since, task = task, want = want }
end
local held = redis.call('HMGET', LOCK, 'owner', 'run')
local function is_on_its_way(run)
    local by = held[1] == 'several:' and redis.call('HGET', LOCK, 'o:' .. run)
    local has_come = by and by ~= 'parked:' .. run
    return not has_come and (held[2] ~= run or held[1] == 'parked:' .. run)
end
local first, number = tonumber(ARGV[1]), 0
local most_come = redis.call('HLEN', LOCK) -- each who has come has a field of it
for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, ARGV[2] + most_come)) do
    if number <= tonumber(ARGV[2]) and is_on_its_way(run) then
        if number >= first then
            add(found.woken, 'p:' .. run, run, redis.call('HGET', TASKS, 's:' .. run))
        end
        number = number + 1
    end
end
local queue = redis.call('ZRANGE', QUEUE, ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #queue, 2 do
    local run = string.match(queue[i], '^p:(.*)$')
    add(found.queue, queue[i], run, queue[i + 1])
end
return cjson.encode(found)
