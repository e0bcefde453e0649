-- delay_resend.lua: postpone the next sending of a woken run, because a live worker has it and starts it as
-- soon as it can.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run for_ms
-- returns 1 postponed | 0 it is not in flight
--
-- for_ms  0: the worker does not start it; the next sweep sends it
-- USES records grants limits rates gates runs answers queue

local run, for_ms = unpack(ARGV)
look('', run)
if not is_in_flight(run, record(run)) then
    return 0
end
-- NEVER REFUSED
redis.call('ZADD', WOKEN, 'XX', integer(now_ms + for_ms), run)
return 1
