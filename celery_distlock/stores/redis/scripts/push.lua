-- push.lua: a woken run is about to be pushed to a worker that has not parked it. If that does not
-- come for its key, the next sweep finds it.
-- KEYS lock queue tasks woken fence done rate
-- ARGV run
-- returns 1 it may be pushed | 0 it has come already | 2 it is for the broker: that was given it, or an
--         earlier one of its key; or no worker took it, again and again
-- USES records grants limits rates gates runs answers queue

local BEHIND = 100 -- in the queue, whose channels are looked at
local run = ARGV[1]
look('', run)
local of = record(run)
if not is_on_its_way(run, of) then
    return 0
end
-- NEVER REFUSED
if is_with_broker(of) or follows_another(of) then
    return 2
end
local channel = of.h
if channel and channel ~= '' then
    -- It is gone, or says nothing: what was parked from there after this is not to wait for it.
    for _, member in ipairs(redis.call('ZRANGE', QUEUE, 0, BEHIND - 1)) do
        local next_run = run_of(member)
        local its = next_run and record(next_run)
        if its and its.h == channel then
            its.h = ''
            write_run(next_run, its)
        end
    end
    of.h = ''
end
of.d = pushes(of) + 1
go(run, of, 'woken', now_ms + UNSENT_MS)
return 1
