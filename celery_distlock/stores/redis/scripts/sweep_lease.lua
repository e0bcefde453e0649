-- sweep_lease.lua: take or renew the lease that allows one process at a time to sweep.
-- KEYS sweeper
-- ARGV process ms
-- returns 1 the process has it | 0 another process has it

local LONGEST_MS = 3600000 -- a longer lease was not written by this script
local process, ms = unpack(ARGV)
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'string' and holder ~= process then
    local left_ms = redis.call('PTTL', KEYS[1])
    if left_ms > 0 and left_ms <= LONGEST_MS then
        return 0
    end
end
redis.call('DEL', KEYS[1]) -- first: a full server does not refuse DEL
redis.call('SET', KEYS[1], process, 'PX', math.min(ms, LONGEST_MS))
return 1
