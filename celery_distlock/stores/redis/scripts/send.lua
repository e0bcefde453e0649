-- send.lua: take in a run as it is sent: the key is kept for it, or it waits in the queue, or for its
-- time. Repeating it changes nothing.
-- KEYS lock queue tasks woken fence done later
-- ARGV run envelope task want delay_ms repeated
-- returns go | {status, wake_run, wake_envelope, ...}: status go, queued or later; then whom that lets
--         in besides; beside an empty run, in how many ms time alone lets the first who waits enter
--
-- go        it is on its way, and who sent it publishes its message; if he dies, a sweep does
-- want      as in acquire.lua
-- delay_ms  0: it waits for nothing but its turn
-- repeated  1: what was sent before and not answered
--
-- later  zset  runs that do not join the queue before their time (ms)
--
-- USES grant
local run, envelope, task, want, delay_ms, repeated = unpack(ARGV)
local parcel = { 'e:' .. run, envelope, 't:' .. run, task }

-- USES lining
local is_plain = want == '' and delay_ms == '0' and repeated == '0'
local holder, holder_run = unpack(is_plain and redis.call('HMGET', LOCK, 'owner', 'run') or {})
local is_alone = holder and holder ~= 'several:' and string.find(holder, 'parked:resting:', 1, true) ~= 1
if is_alone and holder_run ~= run and redis.call('HEXISTS', TASKS, parcel[1]) == 0 then
    -- One has all of it: there is nothing but to wait.
    redis.call('HSET', TASKS, unpack(parcel)) -- before all other writes: a full server may refuse it
    redis.call('ZREM', DONE, run) -- who sends a task again by its id means it
    line_up(microseconds(), run)
    return { 'queued', '', '' }
elseif is_plain and not holder and redis.call('EXISTS', LOCK, QUEUE, TASKS) == 0 then
    -- Nobody has it, nobody waits: most calls end here.
    local now = microseconds()
    local token, refused = grant(now, 'parked:' .. run, run, CLAIM_MS)
    if not token then
        return refused
    end
    redis.call('HSET', LOCK, 'due', integer(now))
    redis.call('HSET', TASKS, 's:' .. run, integer(now), unpack(parcel))
    redis.call('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), run)
    redis.call('ZREM', DONE, run)
    return 'go'
end

-- USES units
-- USES queue
local LATER = KEYS[7]
local now = microseconds()

-- What was answered of a run that is there; nothing: it is not.
local function answered()
    if (repeated == '1' and redis.call('ZSCORE', DONE, run)) or holds(run, now) then
        return 'queued'
    elseif redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        local goes = keeps_for(run) and redis.call('ZSCORE', WOKEN, run)
        return goes and 'go' or redis.call('ZSCORE', LATER, run) and 'later' or 'queued'
    end
    return nil
end

prune(now)
local before = answered()
if before then
    return { before, '', '' }
end
redis.call('HSET', TASKS, unpack(parcel)) -- before all other writes: a full server may refuse it
note_want('p:' .. run, want)
redis.call('ZREM', DONE, run)
if delay_ms ~= '0' then
    redis.call('ZADD', LATER, integer(now / 1000 + delay_ms), run)
    return { 'later', '', '' }
end
line_up(now, run)
local woken = go_on(now)
if woken == 1 then
    if redis.call('ZRANK', QUEUE, 'p:' .. run) == 0 and not also[1] then
        look_ahead(now)
    end
    return { 'queued', '', '', unpack(also) }
end
local answer = { 'queued' }
for i = 1, #woken, 2 do
    if woken[i] == run then
        answer[1] = 'go' -- its message need not come back to who has sent it
    else
        answer[#answer + 1] = woken[i]
        answer[#answer + 1] = woken[i + 1]
    end
end
return answer
