-- mark_sent.lua: a woken run's message is with the broker: send it again only if it does not come. Or it
-- came back unfinished: send it again at the next sweep. Or it was left: others sweep it up. Or it may
-- still be in the broker's queue.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run again
-- returns 1 noted | 0 it has come already
--
-- again  1: it came back. 2: who was to send it leaves it to others; not first of all, or what
--        nobody sends would keep those that were woken after it from being found. 3: there are
--        messages in the broker's queue; look again later
-- USES grant units queue

local run, again = unpack(ARGV)
if not redis.call('ZSCORE', WOKEN, run) then
    return 0
end
redis.call('ZREM', QUEUE, '') -- a full server refuses a script's first write, but not this one
if again == '0' then
    local times = times_sent(run) + 1
    note_sent(run, times)
    local pause = times <= RESENDS and RESEND_MS * 2 ^ (times - 1) or DAY_MS
    local due = microseconds() / 1000 + pause
    redis.call('ZADD', WOKEN, 'XX', integer(due), run)
    if times > 1 then
        expect_copy(run)
    end
    return 1
end
if again == '3' then
    redis.call('ZADD', WOKEN, 'XX', integer(microseconds() / 1000 + RESEND_MS), run)
    return 1
end

if again == '1' then
    redis.call('ZREM', DONE, '~' .. run)
    redis.call('HDEL', TASKS, 'd:' .. run)
    note_sent(run, 0)
    redis.call('ZADD', WOKEN, 'XX', 0, run)
    return 1
end
redis.call('ZADD', WOKEN, 'XX', integer(microseconds() / 1000), run)
if keeps_for(run) then
    free('parked:' .. run) -- for the next one; if that is to be sent, the next sweep finds it
end
return 1
