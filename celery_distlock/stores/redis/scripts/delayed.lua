-- delayed.lua: list deferred runs, without changing anything.
-- KEYS lock queue tasks woken fence done rate lanes later
-- ARGV first last
-- returns runs as JSON: from position first to last, without runs that were delivered already; of each run,
--         in_ms until it joins the queue, the name of its task, if known, and its want (gates.lua)
-- USES records grants runs

local LATER = KEYS[9]
read_clock()
local found = {}
local runs = redis.call('ZRANGE', LATER, ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #runs, 2 do
    local of = record(runs[i])
    if of and of.s == 'later' then
        local in_ms = math.max(0, math.ceil(tonumber(runs[i + 1]) - now_ms))
        found[#found + 1] = { run = runs[i], in_ms = math.min(EXACT, in_ms), task = of.t, want = of.w }
    end
end
return named({ runs = found })
