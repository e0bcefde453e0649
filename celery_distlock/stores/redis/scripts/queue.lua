-- queue.lua: the hand-over of a free key to the next in its queue.
-- KEYS lock queue tasks woken fence done
local GRANT_MS = 1000 -- for a blocked waiter to confirm what was pushed to it
local CLAIM_MS = 5000 -- for a woken task's message to reach a worker; doubled by others on their way
local DOUBLINGS = 2 -- at most: a key that nobody comes for is not to lie idle for longer
local UNSENT_MS = 2000 -- for a woken run to be taken from the desk, or to be sent
local RESEND_MS = 60000 -- after which a message that did not come is sent again; doubles
local RESENDS = 4 -- times; then, for what a broker has lost, once a day
local LAST_RESENDS = 30 -- such days; then the run is forgotten, its messages are the broker's
local DAY_MS = 86400000
local AHEAD = 1000000 -- µs that others' clocks may be: nobody comes later than that
local DONE_MS = 3600000 -- how long a late second delivery is recognised; longer than all resends

-- Tells how many heard it; an error, for want of a permission say, leaves open whether any did.
local function publish(channel, message)
    if string.find(channel, '{', 1, true) then
        return redis.pcall('SPUBLISH', channel, message) -- of this slot: no other node is told
    end
    return redis.pcall('PUBLISH', channel, message)
end

local givers = '' -- the runs that give the key up, or have; a line each

-- Pushes a run to the worker that parked it; false if that is gone.
local function push(run, envelope)
    local desk, arrival = unpack(redis.call('HMGET', TASKS, 'h:' .. run, 's:' .. run))
    if not desk or desk == '' then
        return false
    end
    local head = string.format('%d %d %d %s ', #LOCK, #run, #givers, arrival or '0')
    local heard = publish(desk, head .. LOCK .. run .. givers .. envelope)
    return type(heard) == 'number' and heard > 0
end

-- Grants the free key to one who has to come for it, and who came at `arrival`; false: refused.
local function reserve(now, owner, run, arrival, for_ms)
    if not grant(now, owner, run, for_ms) then
        return false
    end
    redis.call('HSET', LOCK, 'due', arrival)
    return true
end

-- Takes the key from one who was handed it and has not come, and gives a run its place back.
local function step_back(holder, arrival)
    redis.call('DEL', LOCK)
    local run = string.match(holder, '^parked:(.*)$')
    if run and redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        redis.call('ZADD', QUEUE, 'NX', arrival, 'p:' .. run)
    end
end

-- Puts a run on its way to its key. Returns it and its envelope, which the caller has to send, or
-- two empty strings if it was pushed.
local function wake(now, run, envelope)
    redis.call('ZADD', WOKEN, integer(now / 1000 + UNSENT_MS), run)
    if push(run, envelope) then
        return '', ''
    end
    return run, envelope
end

-- How long the key is kept for a run that is put on its way.
local function claim_ms()
    return CLAIM_MS * 2 ^ math.min(redis.call('ZCARD', WOKEN), DOUBLINGS)
end

-- The first who is blocked here, and when he came.
local function first_blocked()
    local queue = redis.call('ZRANGE', QUEUE, 0, -1, 'WITHSCORES')
    for i = 1, #queue, 2 do
        if string.sub(queue[i], 1, 2) == 'b:' then
            return queue[i], queue[i + 1]
        end
    end
end

-- Keeps the free key for a run that needs others, too, and is not to be sent before it has them all;
-- it stays the first in the queue.
local function keep_for(now, run, arrival, for_ms)
    redis.call('HSET', TASKS, 'l:' .. run, 1)
    if not reserve(now, 'parked:' .. run, run, arrival, for_ms) then
        return false
    end
    if givers ~= '' then
        redis.call('HSET', LOCK, 'from', givers)
    end
    return true
end

-- Gives the free key to the first waiter that is alive. Returns nothing if there is none, true if
-- that is `own`, or one who stands there since `stands` (0: nobody), else the run and the envelope
-- that the caller has to send, or two empty strings if the waiter knows already. Of a run that needs
-- other keys, too, it is no envelope, but a list with all that it needs.
local function hand_over(own, stands)
    local now
    while true do
        local head, arrival = unpack(redis.call('ZRANGE', QUEUE, 0, 0, 'WITHSCORES'))
        if not head then
            return nil
        end
        local name, kept = string.sub(head, 3), {}
        if string.sub(head, 1, 2) == 'p:' then
            kept = redis.call('HMGET', TASKS, 'e:' .. name, 'k:' .. name, 'l:' .. name)
        end
        if kept[3] then
            -- It had its turn, and still waits for another key. If who has that is blocked here, the
            -- two would wait for ever: so one who is goes before, this time.
            redis.call('HDEL', TASKS, 'l:' .. name)
            local blocked, since = first_blocked()
            if blocked then
                head, arrival, name = blocked, since, string.sub(blocked, 3)
            end
        end
        if head == own or (stands > 0 and stands < tonumber(arrival)) then
            return true
        end
        now = now or microseconds()
        if string.sub(head, 1, 2) == 'p:' then
            local envelope, names = kept[1], kept[2]
            if names then
                return keep_for(now, name, arrival, UNSENT_MS) and name, { names }
            end
            if envelope then
                if not reserve(now, 'parked:' .. name, name, arrival, claim_ms()) then
                    return nil
                end
                redis.call('ZREM', QUEUE, head)
                if redis.call('ZSCORE', WOKEN, name) then
                    return '', '' -- it stepped back, and is on its way already
                end
                return wake(now, name, envelope)
            end
        else
            local inbox, owner = string.match(name, '^(%S+) (.+)$')
            local heard = inbox and publish(inbox, owner) or 0
            if type(heard) ~= 'number' or heard > 0 then
                if not reserve(now, owner, '', arrival, GRANT_MS) then
                    return nil
                end
                redis.call('ZREM', QUEUE, head)
                return '', ''
            end
        end
        redis.call('ZREM', QUEUE, head)
    end
end

-- Whether a woken run has not come to its key yet, as far as is known.
local function on_its_way(run)
    local held = redis.call('HMGET', LOCK, 'owner', 'run')
    local has_come = held[2] == run and held[1] ~= 'parked:' .. run
    local ends_ms = tonumber(redis.call('ZSCORE', DONE, '~' .. run) or 0)
    local ends = ends_ms > microseconds() / 1000 -- else it is taken for dead
    return not has_come and not ends and redis.call('ZSCORE', WOKEN, run)
end

-- How often a run's message was given to the broker since it was parked last.
local function times_sent(run)
    return math.max(0, tonumber(redis.call('HGET', TASKS, 'n:' .. run) or 0) or 0)
end

-- Takes the key from whoever has it, for the next in its queue. Returns 1, or the run and the
-- envelope that the caller has to send.
local function free()
    redis.call('DEL', LOCK)
    local run, envelope = hand_over('', 0)
    if type(run) == 'string' and run ~= '' then
        return { run, envelope }
    end
    return 1
end

-- Remembers an end. At maxmemory, too: a full server refuses only the first write of a script, so
-- one that it never refuses goes before.
local function note_end(member, now_ms, at_ms)
    redis.call('ZREMRANGEBYSCORE', DONE, '-inf', integer(now_ms - DONE_MS))
    redis.pcall('ZADD', DONE, integer(at_ms), member)
    redis.call('PEXPIRE', DONE, DONE_MS)
end

local function record_end(run)
    local now_ms = microseconds() / 1000
    redis.call('ZREM', DONE, '~' .. run)
    note_end(run, now_ms, now_ms)
end

-- Keeps a second delivery from running while the first one's result is on its way to be stored: for
-- as long as its lease would have lasted, if its process died now.
local function hold_back(run)
    local now_ms = microseconds() / 1000
    local until_ms = now_ms + math.max(redis.call('PTTL', LOCK), CLAIM_MS)
    note_end('~' .. run, now_ms, until_ms)
    if redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        redis.call('ZREM', QUEUE, 'p:' .. run)
        redis.pcall('ZADD', WOKEN, integer(until_ms), run)
    end
end

-- Strikes a run from the parked ones; true if it was there.
local function unpark(run)
    local parked = redis.call('HDEL', TASKS, 'e:' .. run, 's:' .. run, 'h:' .. run)
    redis.call('HDEL', TASKS, 't:' .. run, 'n:' .. run, 'd:' .. run, 'k:' .. run, 'l:' .. run)
    if parked == 0 then
        return false
    end
    redis.call('ZREM', QUEUE, 'p:' .. run)
    redis.call('ZREM', WOKEN, run)
    return true
end

-- Notes that a run has come to its key; with `keep` its message stays here until the run has ended.
local function arrive(now, run, keep, lease_ms)
    if keep == '1' and redis.call('HEXISTS', TASKS, 'e:' .. run) == 1 then
        redis.call('ZREM', QUEUE, 'p:' .. run)
        redis.call('ZADD', WOKEN, integer(now / 1000 + lease_ms), run)
    else
        unpark(run)
    end
end

-- Gives a run the key that is kept for it; returns the token.
local function claim(now, owner, run, keep, lease_ms)
    redis.call('PEXPIRE', LOCK, lease_ms) -- first: a full server refuses what begins with HSET
    redis.call('HSET', LOCK, 'owner', owner)
    redis.call('HDEL', LOCK, 'due', 'from')
    arrive(now, run, keep, lease_ms)
    return redis.call('HGET', LOCK, 'token')
end

-- Lets a run stand no longer at a key that is kept for it; at the first one it is put on its way, and
-- what `wake` says is returned.
local function depart(now, run, is_first)
    redis.call('PEXPIRE', LOCK, claim_ms())
    local from = redis.call('HGET', LOCK, 'from')
    if from then
        givers = givers == '' and from or givers .. '\n' .. from
    end
    if not is_first then
        unpark(run)
        return '', ''
    end
    local envelope = redis.call('HGET', TASKS, 'e:' .. run)
    if redis.call('HDEL', TASKS, 'k:' .. run, 'l:' .. run) == 0 or not envelope then
        return '', '' -- by a request before, whose answer was lost: the next sweep sends it
    end
    redis.call('ZREM', QUEUE, 'p:' .. run)
    return wake(now, run, envelope)
end
