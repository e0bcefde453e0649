-- resend_all.lua: make due at once what is on its way, as if it had not been sent yet.
-- KEYS lock queue tasks woken fence done rate
-- ARGV limit
-- returns how many were made due
--
-- Not those that have come: who runs, or whose result is being stored.
-- USES records grants limits rates gates runs answers queue

-- NEVER REFUSED
look('', '')
local roused = 0
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
        roused = roused + 1
    end
end
return roused
