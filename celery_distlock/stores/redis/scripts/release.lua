-- release.lua: give the key up, or a place in its queue, and hand the key to the next waiter.
-- KEYS lock queue tasks woken fence done rate
-- ARGV owner run ended [channel destination request]
-- returns 1 given up | 0 was not ours | as queue.lua's `reply`: given up, and the runs that are let in
--
-- ended     0: the run has not ended (its process is being killed, its message goes back).
--           1: it has; a second delivery of it that is parked is dropped.
--           2: it has, and a second delivery that comes later is to be recognised.
--           3: its body has, and its result is not stored yet: a second delivery is held back.
-- channel   of the worker that asks: what was sent to this destination, and waits, is pushed there
-- request   JSON; what is not in it is false:
-- inbox     where a blocked waiter that gives up had waited
-- keep_ms   how long the key stays locked for keep_run to claim; if that is parked already, the
--           key is handed to it now
-- unstarted what was taken has come to nothing, and is not counted where the key has a rate
-- USES grant handing units queue

local owner, run, ended, channel, destination, request = unpack(ARGV)
request = request and cjson.decode(request) or {}
local inbox, keep_run, keep_ms, unstarted = request.inbox, request.keep_run, request.keep_ms, request.unstarted
near_channel, near = channel, destination

local may_be_short = tonumber(ended) < 2 and not keep_ms and redis.call('EXISTS', QUEUE, TASKS) == 0
if may_be_short and not unstarted then
    -- Nobody waits, nothing is to be noted: most releases end here.
    local holder, was_again, rest = unpack(redis.call('HMGET', LOCK, 'owner', 'again', 'rest'))
    if holder ~= owner and holder ~= 'several:' then
        return 0
    end
    local is_noted, is_last = was_again or rest, holder == owner
    if not (is_noted or is_last) then
        local mine, again = 'h:' .. owner, 'again:' .. run
        local held = redis.call('HMGET', LOCK, mine, 'holders', 'next', 'up', again)
        is_last = held[1] and held[2] == '1' and tonumber(held[3]) > microseconds() / 1000
        is_noted = held[4] or held[5]
    end
    if is_last and not is_noted then
        redis.call('DEL', LOCK)
        return 1
    end
end

if not (may_be_short or keep_ms or inbox or unstarted) and tonumber(ended) < 2 then
    local given = hand_to_first(owner, run)
    if given then
        return answer(given)
    end
end

local now = microseconds()
if unstarted then
    refund(owner, now)
end
if may_be_short then
    local mine, again = 'h:' .. owner, 'again:' .. run
    local held = redis.call('HMGET', LOCK, mine, again, 'o:' .. run, unpack(COUNTED))
    local holder, used, holders, rest, up, _, next_ms, slots = unpack(held, 4)
    local share = holder == SHARED and read(held[1])
    local is_read = tonumber(used) and tonumber(holders) and tonumber(next_ms)
    local is_short = is_read and not (rest or up or held[2]) and holders ~= '1'
    if share and is_short and tonumber(next_ms) > now / 1000 then
        redis.call('HDEL', LOCK, mine, 'stamp:' .. run, 'from:' .. run, 'start:' .. owner)
        if run ~= '' and held[3] == owner then
            redis.call('HDEL', LOCK, 'o:' .. run)
        end
        uncount(share, used, holders, slots)
        return 1
    end
end

givers = run
prune(now)

local function may_come_again()
    local again, of, beside = unpack(redis.call('HMGET', LOCK, 'again', 'run', 'again:' .. run))
    return (again and of == run) or beside
end

if run ~= '' and ended == '3' then
    hold_back(run)
elseif run ~= '' and ended ~= '0' then
    local parked = unpark(run)
    if parked or ended == '2' or may_come_again() then
        record_end(run)
    end
elseif run ~= '' and redis.call('HGET', LOCK, 'owner') == SHARED then
    -- What was set aside as its second delivery is not to wait for the end of its lease.
    if holds(run, now) and redis.call('ZSCORE', WOKEN, run) then
        redis.call('ZREM', QUEUE, '') -- a full server refuses a script's first write, but not this one
        redis.call('ZADD', WOKEN, 'XX', integer(now / 1000), run)
    end
end
local waited = false
if inbox then
    local member = 'b:' .. inbox .. ' ' .. owner
    waited = strike(member)
end
local holder = redis.call('HGET', LOCK, 'owner')
local share = holder == SHARED and share_of(owner)
if holder ~= owner and not share then
    if waited then
        hand_on(now, '', 0) -- those behind it may fit
    end
    return woken[1] and answer(0) or 0
end
if keep_ms and put_first(keep_run) then
    keep_ms = nil -- its message came before, and no other process would send it
end
local kept_by = keep_ms and share and redis.call('HGET', LOCK, 'o:' .. keep_run)
if kept_by and kept_by ~= owner and kept_by ~= 'parked:' .. keep_run and share_of(kept_by) then
    keep_ms = nil -- that run has its part already
end
if keep_ms then
    local kept, rests = 'parked:' .. keep_run, string.find(keep_run, 'resting:', 1, true) == 1
    leave_start(kept, now)
    if share then
        pass_on(owner, share, kept, keep_run, keep_ms, now)
        if rests then
            redis.call('HSET', LOCK, 'rests', 1)
        end
    else
        -- First: a full server refuses what begins with HSET.
        redis.call('HDEL', LOCK, 'was', 'start:' .. owner)
        redis.call('HSET', LOCK, 'owner', kept, 'run', keep_run)
        if limit_at(now).rates then
            redis.pcall('HSET', LOCK, 'rated', 1)
        end
        redis.call('PEXPIRE', LOCK, keep_ms)
        outlive_rest(now)
    end
    if rests then
        look_ahead(now)
    end
    return answer(1)
end
free(owner)
return answer(1)
