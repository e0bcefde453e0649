-- resend_all.lua: make runs in flight due now, as if they had not been sent.
-- KEYS lock queue tasks woken fence done rate lanes
-- ARGV limit
-- returns the number of runs that are due now
--
-- Runs that hold their key, or whose result is being stored, are left out.
-- USES records grants limits rates gates runs answers queue

-- NEVER REFUSED
look('', '')
local many = 0
for _, run in ipairs(redis.call('ZRANGE', WOKEN, 0, ARGV[1] - 1)) do
    local of = record(run)
    local _, settles = ends_of(run)
    if not held_by(run) and not settles then
        if of then
            of.d = is_with_broker(of) and of.d or nil
            of.n = nil
            go(run, of, of.s, 0)
        end
        redis.call('ZADD', WOKEN, 'XX', 0, run)
        many = many + 1
    end
end
return many
