-- count.lua: add to the counters.
-- KEYS counts
-- ARGV added
-- returns how many were added to
--
-- added  by how much each rises, in JSON

local KEPT_S = 30 * 86400 -- after the last was added
local how_many = 0
for what, by in pairs(cjson.decode(ARGV[1])) do
    local added = string.format('%.17g', by)
    local sum = redis.pcall('HINCRBYFLOAT', KEYS[1], what, added)
    if type(sum) == 'table' then -- what is there is no number of ours; a full server refuses here
        redis.call('HSET', KEYS[1], what, added)
    end
    how_many = how_many + 1
end
redis.call('EXPIRE', KEYS[1], KEPT_S)
return how_many
