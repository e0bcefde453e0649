-- count.lua: add to counters.
-- KEYS counts
-- ARGV added
-- returns the number of counters
--
-- added  JSON: the increment of each

local KEPT_S = 30 * 86400 -- after the last increment
local how_many = 0
for what, by in pairs(cjson.decode(ARGV[1])) do
    local added = string.format('%.17g', by)
    local sum = redis.pcall('HINCRBYFLOAT', KEYS[1], what, added)
    if type(sum) == 'table' then -- not a number; if the server is full, this fails too
        redis.call('HSET', KEYS[1], what, added)
    end
    how_many = how_many + 1
end
redis.call('EXPIRE', KEYS[1], KEPT_S)
return how_many
