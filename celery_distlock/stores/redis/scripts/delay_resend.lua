-- delay_resend.lua: a woken run is with a worker that lives, and is started as soon as that can: nobody else
-- is to send it meanwhile.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run for_ms
-- returns 1 noted | 0 it has come already
--
-- for_ms  0: the worker does not start it any more; the next sweep sends it
-- USES records grants limits rates gates runs answers queue

local run, for_ms = unpack(ARGV)
look('', run)
if not is_on_its_way(run, record(run)) then
    return 0
end
-- NEVER REFUSED
redis.call('ZADD', WOKEN, 'XX', integer(now_ms + for_ms), run)
return 1
