-- waiters.lua: look at those who wait for a key, without changing anything.
-- KEYS lock queue tasks woken
-- ARGV first last
-- returns {woken, member, arrival, task, want, ...}: first so many runs on their way, from number first
--         to last of them, then the queue from place first to last; arrival in µs, task the name of a
--         parked run's, where known; want as units.lua has it

local LOCK, QUEUE, TASKS, WOKEN = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local found = { 0 }
local function add(member, run, arrival)
    found[#found + 1] = member
    found[#found + 1] = arrival or 0
    found[#found + 1] = run and redis.call('HGET', TASKS, 't:' .. run) or ''
    found[#found + 1] = redis.call('HGET', TASKS, 'w:' .. member) or ''
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
            add('p:' .. run, run, redis.call('HGET', TASKS, 's:' .. run))
            found[1] = found[1] + 1
        end
        number = number + 1
    end
end
local queue = redis.call('ZRANGE', QUEUE, ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #queue, 2 do
    local run = string.match(queue[i], '^p:(.*)$')
    add(queue[i], run, queue[i + 1])
end
return found
