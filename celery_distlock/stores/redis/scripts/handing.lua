-- handing.lua: the usual hand-over, of a key that one has alone to one who wants all of it. It does
-- what queue.lua would, in half the time; whatever is unusual is left to that.
-- KEYS lock queue tasks woken fence done rate

local function append(words, run, fields)
    for _, field in ipairs(fields) do
        words[#words + 1] = field .. run
    end
end

local function has_any(values, first, last)
    for i = first, last do
        if values[i] then
            return true
        end
    end
    return false
end

-- Gives the key to one who came for it at `arrival`, if the server has room.
local function reserve_next(owner, run, arrival, for_ms, now)
    local token = mint(now)
    if not token then
        return false
    end
    redis.call('DEL', LOCK)
    redis.call('HSET', LOCK, 'owner', owner, 'token', token, 'run', run, 'due', arrival)
    return not begin_lease(for_ms)
end

local function hand_to_waiter(head, arrival)
    local inbox, owner = string.match(head, '^b:(%S+) (.+)$')
    local heard = inbox and publish(inbox, owner) or 0
    if heard == 0 or not reserve_next(owner, '', arrival, GRANT_MS, microseconds()) then
        return nil
    end
    redis.call('ZREM', QUEUE, head)
    return 1
end

local function hand_to_parked(head, next_run, arrival, giver, envelope, channel, since)
    if redis.call('ZCARD', WOKEN) > 0 then
        return nil -- this one is on its way already, or another one, which it must not pass
    end
    local now, for_ms = microseconds(), claim_ms_of(0)
    if not reserve_next('parked:' .. next_run, next_run, arrival, for_ms, now) then
        return nil
    end
    redis.call('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), next_run)
    redis.call('ZREM', QUEUE, head) -- only then: a script may be broken off
    if channel and channel ~= '' and deliver(channel, next_run, since, giver, envelope) then
        return 1
    end
    note_woken(next_run, envelope)
    return 1
end

-- Takes the key from `owner` (false: nobody has it), whose run has ended or has none, and gives it to
-- the first in the queue. Returns 1; nothing, and has changed nothing, if that is not as simple as
-- this.
local function hand_to_first(owner, run)
    local held = redis.call('HMGET', LOCK, 'owner', 'again', 'again:' .. run, 'rest')
    local head, arrival = unpack(redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES'))
    if held[1] ~= owner or has_any(held, 2, 4) or not head then
        return nil
    end
    local ask = { 'HMGET', TASKS, 'limit', 'w:' .. head }
    if run ~= '' then -- is it parked, was it, or does it come a second time?
        append(ask, run, { 'e:', 's:', 'h:', 't:', 'n:', 'd:', 'k:', 'l:', 'q:', 'w:p:' })
    end
    local is_blocked, next_run = string.sub(head, 1, 2) == 'b:', string.sub(head, 3)
    if not is_blocked then
        append(ask, next_run, { 'k:', 'l:', 'e:', 'h:', 's:', 'q:' })
    end
    local known = redis.call(unpack(ask))
    local usual = #ask - 2 - (is_blocked and 0 or 4)
    if has_any(known, 1, usual) then
        return nil
    elseif is_blocked then
        return hand_to_waiter(head, arrival)
    end
    local envelope, channel, since, sent_to = unpack(known, usual + 1)
    channel = channel_of(channel, sent_to)
    return envelope and hand_to_parked(head, next_run, arrival, run, envelope, channel, since)
end
