-- limit.lua: set or remove an operator's limit, of a key or of one of its lanes, and serve the waiters that it
-- admits.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV capacity until_ms author rates [lane]
-- returns 1 | a `reply` (answers.lua) with the runs that are admitted
--
-- capacity  -: as requested; empty: remove the limit
-- until_ms  0: no end
-- rates     see rates.lua; empty: as requested
-- USES records grants limits rates gates lanes runs answers queue

local capacity, until_ms, author, rates, lane = unpack(ARGV)

-- Returns the limits of all other places, the key's first.
local function other_lines()
    local lines = {}
    for line in string.gmatch(field('limit') or '', '[^\n]+') do
        if read_limit(line) ~= lane then
            lines[#lines + 1] = line
        end
    end
    return lines
end

look('', '')
limit_now() -- it removes those that have ended
local lines = other_lines()
if capacity ~= '' then
    local much = rates == '' and capacity or capacity .. '/' .. rates
    local words = table.concat({ much, until_ms, integer(now), (string.gsub(author, '\n', ' ')) }, ' ')
    table.insert(lines, lane and #lines + 1 or 1, (lane and '@' .. lane .. ' ' or '') .. words)
end
if lane then
    uncap(lane) -- first: a script may be interrupted
end
write_limits(lines, redis.call)
key.limits = nil
free()
return answer(1)
