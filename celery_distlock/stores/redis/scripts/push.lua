-- push.lua: push a woken run to a worker that has not parked it. If it does not claim its key, the next
-- sweep finds it.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV run [payload channels]
-- returns 1 a channel has received it, or the caller must push it | 0 it is not in flight | 2 send it through
--         the broker: the broker has it, or an earlier call of its key, or no channel received it, or several
--         pushes had no effect
--
-- payload   what the first of the channels with a subscriber receives; none: the caller pushes it, since in
--           a cluster the channels belong to other nodes
-- channels  separated by spaces
-- USES records grants limits rates gates runs answers queue

local BEHIND = 100 -- waiters whose channel is checked
local run, payload, channels = unpack(ARGV)

local function is_received()
    for channel in string.gmatch(channels or '', '%S+') do
        local receivers = publish(channel, payload)
        if type(receivers) == 'number' and receivers > 0 then
            return true
        end
    end
    return not payload
end

look('', run)
local of = record(run)
if not is_in_flight(run, of) then
    return 0
end
-- NEVER REFUSED
if is_with_broker(of) or follows_another(of) then
    return 2
end
local channel = of.h
if channel and channel ~= '' then
    -- That worker is gone or silent: other runs that it parked must not be pushed to it.
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
of.d = times_in(of.d) + 1
go(run, of, 'woken', now_ms + UNSENT_MS)
return is_received() and 1 or 2
