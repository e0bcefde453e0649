-- sweep.lua: find what a crash left behind at one key: a free key with waiters, a run whose waker
-- died before it was sent, a message that never came, a run that ended with its process.
-- KEYS lock queue tasks woken fence done rate
-- ARGV limit
-- returns {waiting, run, envelope, ...}; waiting: 1 somebody waits or is on its way | 0 nobody; beside
--         an empty run: in how many ms time alone lets somebody enter
--
-- USES grant
-- USES units
-- USES queue
local now = microseconds()
local found = {}
redis.call('ZREM', QUEUE, '') -- nobody of ours; and a full server refuses a script's first write
local due = redis.call('ZRANGEBYSCORE', WOKEN, '-inf', integer(now / 1000), 'LIMIT', 0, ARGV[1])
prune(now)
for _, run in ipairs(due) do
    local envelope = redis.call('HGET', TASKS, 'e:' .. run)
    local runs, left_ms = holds(run, now)
    if envelope and runs then
        redis.pcall('ZADD', WOKEN, integer(now / 1000 + left_ms), run)
    elseif envelope and redis.call('ZSCORE', QUEUE, 'p:' .. run) then
        redis.call('ZREM', WOKEN, run) -- it stepped back, and its turn comes again
    elseif envelope and times_sent(run) >= RESENDS + LAST_RESENDS and not keeps_for(run) then
        unpark(run)
    elseif envelope then
        redis.pcall('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), run)
        found[#found + 1] = run
        found[#found + 1] = envelope
    else
        redis.call('ZREM', WOKEN, run)
    end
end
local woken = go_on(now)
if woken == 1 then
    look_ahead(now) -- behind one who has all of it, and rests
    woken = { '', '', unpack(also) }
end
for _, each in ipairs(woken) do
    found[#found + 1] = each
end
local waits = redis.call('EXISTS', QUEUE, WOKEN) > 0 or limit_at(now)
return { waits and 1 or 0, unpack(found) }
