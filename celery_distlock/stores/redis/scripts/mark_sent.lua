-- mark_sent.lua: record what became of a woken run's message, and when to send it again.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run again
-- returns 1 recorded | 0 the run is not in flight
--
-- again  0: the broker has it; send it again only if it does not arrive. 1: it was returned unfinished;
--        the next sweep sends it. 2: the caller cannot send it; another process's sweep does. It is not
--        put first, so that runs which cannot be sent do not keep the sweep from others. 3: the
--        broker's queue has messages; check again later
-- USES records grants limits rates gates runs answers queue

local run, again = unpack(ARGV)
if not redis.call('ZSCORE', WOKEN, run) then
    return 0
end
local of = record(run)
-- NEVER REFUSED
read_clock()
local at_ms = now_ms
if again == '0' and of then
    local times = times_in(of.n) + 1
    of.n, of.d = times, PUSHES -- it is not pushed from now on
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
if again ~= '2' then
    return 1 -- before most functions are made
end
load('', run)
prune()
local reserved = grant_for(run)
if reserved and not want_in(of and of.w).is_strict then
    free(reserved) -- for the next one; if it must be sent, the next sweep finds it
end
return 1
