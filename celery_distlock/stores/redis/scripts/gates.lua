-- gates.lua: decides whether a request is admitted now, and if not, when time alone will admit it.
-- KEYS lock queue tasks woken fence done rate lanes
-- USES records limits grants rates lanes
-- TOGETHER is_capped most_for lane_limits

local NEVER = 1 / 0 -- not through time alone

-- Parses a want: units/capacity, units/capacity/terms, or either with its order; empty: exclusive. An order:
-- + and the ms that it is ahead of its arrival; ! if it is not passed once it was dispatched; @ and its lane
-- (lanes.lua); each if asked for.
local function want_in(text)
    if not text or text == '' then
        return { units = 1, capacity = 1, text = '' }
    end
    local units, capacity, rest = string.match(text, '^(%d+)/(%d+)(.*)$')
    local want = { units = tonumber(units or 1), capacity = tonumber(capacity or 1), text = text }
    if rest and rest ~= '' then
        local form = '^/?([^+!@%s]*)%+?%d*(!?)@?(%d*):?(%d*)/?(%S*)$'
        local terms, strict, share, most, lane = string.match(rest, form)
        want.terms, want.is_strict = terms ~= '' and terms or nil, strict == '!'
        if share and share ~= '' then -- in thousandths
            want.lane, want.share, want.most = lane, tonumber(share), tonumber(most)
        end
    end
    return want
end

-- When (ms) the first resting unit becomes free; with many grants, when to check again.
local function first_rest_end()
    if not key.rests then
        return NEVER
    elseif key.count > FEW then
        return math.max(key.next, now_ms + LOOK_MS)
    end
    local first = NEVER
    for _, grant in ipairs(live_grants()) do
        if grant.stage == RESTING then
            first = math.min(first, grant.ends)
        end
    end
    return first
end

-- The gates. Each returns nothing if it is open, else when (ms) it opens through time alone. `mine` is
-- the request's own grant, if it has one; it does not count.
local function held_alone(_, mine)
    if key.alone and key.alone ~= mine then
        return key.alone.stage == RESTING and math.max(key.alone.ends, key.rest) + 1 or NEVER
    end
end

local function paused()
    return limit_now().capacity == 0 and (limit_now().ends or NEVER) or nil
end

local function resting()
    return key.rest > now_ms and key.rest or nil
end

local function taken(want, mine)
    if key.up then
        return NEVER
    elseif want.capacity == 1 and key.count > (mine and mine.units > 0 and 1 or 0) then
        return math.min(first_rest_end(), limit_now().ends or NEVER)
    end
end

local function exceeds(of, want, mine)
    local others = key.count - (mine and 1 or 0)
    return of > 0 and others > 0 and key.used - (mine and mine.units or 0) + needed(want) > of
end

local function full(want, mine)
    if want.capacity ~= 1 and not key.alone and exceeds(limit_now().capacity or want.capacity, want, mine) then
        return math.min(first_rest_end(), limit_now().ends or NEVER)
    end
end

local function too_soon(want, mine)
    if mine and string.find(mine.flags, STARTS, 1, true) then
        return nil
    end
    local terms = terms_for(want)
    local wait = terms and starts_by(terms) or 0
    if wait > 0 then
        local ends = limit_now().rates and limit_now().ends or NEVER
        return math.min(now_ms + wait / 1000, ends)
    end
end

-- Returns the most units that a want's lane may have, if not any number, and when (ms) an operator's limit ends.
local function most_for(want)
    local limit = lane_limits()[want.lane]
    if limit then
        return limit.capacity, limit.ends
    end
    return want.most
end

-- Whether a want's lane has as many units as it may, without its own grant; one that has none may go, to be sure.
local function is_capped(want, mine)
    local most = most_for(want)
    if not most or most == 0 then
        return most == 0
    end
    local used = lane_used(noted_as(want.lane)) - (mine and mine.units or 0)
    return used > 0 and used + needed(want) > most
end

local function capped(want, mine)
    if not mine and is_capped(want) then
        local most, ends = most_for(want)
        return math.min(most == 0 and NEVER or first_rest_end(), ends or NEVER)
    end
end

local function keeps_out(want, mine)
    local at = held_alone(want, mine) or paused() or resting() or taken(want, mine) or full(want, mine)
    return at or (want.lane and (want.most or key.limits.lanes[want.lane]) and capped(want, mine) or nil)
end

-- Returns nothing if a request is admitted now, else when (ms) it will be.
local function opens(want, mine)
    return keeps_out(want, mine) or too_soon(want, mine)
end

-- Whether a request that is not admitted before `at` waits for time alone, or for the end of a pause.
local function waits_for_time(at, want)
    local is_paused = not key.alone and (limit_now().capacity == 0 or (want.lane ~= nil and most_for(want) == 0))
    return at ~= nil and (at < NEVER or is_paused)
end

local function in_ms(at)
    return at and at < NEVER and math.max(1, math.ceil(at - now_ms)) or nil
end

-- In how many ms the rates admit a request that everything else admits now; else nothing.
local function opens_by_rate(want)
    return not keeps_out(want) and in_ms(too_soon(want)) or nil
end

-- Whether a reservation has all the units that the run wants.
local function is_enough(grant, want)
    if grant.units == 0 or want.capacity == 1 then
        return grant.units == 0 and want.capacity == 1
    end
    return needed(want) <= grant.units
end

-- Whether a reservation still matches the run's want, which may have changed.
local function is_wanted(grant, want, text_before)
    local fits = grant.units == 0 or text_before == want.text or want.capacity == 0
    return is_enough(grant, want) and (fits or key.used <= want.capacity)
end

-- Returns nothing if a reservation may be claimed now; else when (ms), because a rest, a pause, a limit
-- or a rate was set since.
local function claim_opens(grant, want)
    local at = too_soon(want, grant)
    if grant.place == 0 then
        return at -- kept by the previous attempt, and treated as held since
    end
    at = at or paused() or resting()
    local of = limit_now().capacity
    if not at and of and want.capacity ~= 1 and exceeds(of, want, grant) then
        at = limit_now().ends or NEVER
    end
    local limit = want.lane and key.limits.lanes[want.lane]
    if not at and limit and is_capped(want, grant) then
        at = limit.ends or NEVER
    end
    return at
end
