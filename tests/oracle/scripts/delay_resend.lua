-- delay_resend.lua: a woken run is with a worker that lives, and is started as soon as that can: nobody else
-- is to send it meanwhile.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run for_ms
-- returns 1 noted | 0 it has come already
--
-- for_ms  0: the worker does not start it any more; the next sweep sends it
-- USES grant units queue

local run, for_ms = unpack(ARGV)
if not on_its_way(run) then
    return 0
end
redis.call('ZREM', QUEUE, '') -- a full server refuses a script's first write, but not this one
redis.call('ZADD', WOKEN, 'XX', integer(microseconds() / 1000 + for_ms), run)
return 1
