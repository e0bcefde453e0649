-- waiters.lua: list the waiters of a key and its runs in flight, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV first last
-- returns as JSON woken: the runs in flight, and queue: the waiters, each from position first to last; of
--         each its run, or as `blocked` inbox and owner; since (µs); task, the name of a parked run's task,
--         if known; and its want (gates.lua)
-- USES records grants runs

local first, last = tonumber(ARGV[1]), tonumber(ARGV[2])
local found = { woken = {}, queue = {} }

local function add(list, member, run, since)
    local of = run and record(run) or {}
    local blocked, want = not run and string.match(member, '^b:(.*)$'), of.w or (not run and field('w:' .. member))
    list[#list + 1] = { run = run, blocked = blocked, since = since or of.p, task = of.t, want = want }
end

read_clock()
load('', '')
local number = 0
for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, last + math.max(key.count, 1))) do -- some hold the key
    if number <= last and not held_by(run) then
        if number >= first then
            add(found.woken, 'p:' .. run, run)
        end
        number = number + 1
    end
end
local queue = redis.call('ZRANGE', QUEUE, first, last, 'WITHSCORES')
for i = 1, #queue, 2 do
    add(found.queue, queue[i], string.match(queue[i], '^p:(.*)$'), queue[i + 1])
end
return named(found)
