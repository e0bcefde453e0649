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
-- USES records grants limits rates gates runs answers queue

local run, again = unpack(ARGV)
local of = record(run)
if not redis.call('ZSCORE', WOKEN, run) then
    return 0
end
-- NEVER REFUSED
read_clock()
local at_ms = now_ms
if again == '0' and of then
    local times = times_sent(of) + 1
    note_sent(of, times)
    at_ms = now_ms + (times <= RESENDS and RESEND_MS * 2 ^ (times - 1) or DAY_MS)
    write_run(run, of)
    if times > 1 then
        expect_copy(run, of)
    end
elseif again == '3' then
    at_ms = now_ms + RESEND_MS
elseif again == '1' then
    redis.call('ZREM', DONE, '~' .. run)
    at_ms = 0
    if of then
        of.d, of.n = nil, nil
        write_run(run, of)
    end
end
redis.call('ZADD', WOKEN, 'XX', integer(at_ms), run)
if again == '2' then
    load('', run)
    prune()
    local reserved = grant_for(run)
    if reserved then
        free(reserved) -- for the next one; if that is to be sent, the next sweep finds it
    end
end
return 1
