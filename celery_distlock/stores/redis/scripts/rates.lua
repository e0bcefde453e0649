-- rates.lua: limits how often a key is taken. A start counts from its reservation until a little more
-- than `per` after its claim. So no period of that length has more starts than the limit, however long
-- messages take.
-- KEYS lock queue tasks woken fence done rate lanes
--
-- rate  p:<per (µs)> a series, the starts of the last period: when the next evenly spaced start is due
--       (µs), when the series was last asked for (µs), the limit, and for each part of the period with
--       starts, the time of the last one (µs) and their number.
--       r:<owner> the terms of a reserved start
--       reserved: sum of the starts in those rows; series: the periods of all p:. Used instead of the
--       rows when there are many
--       looks: when the first blocked waiter tries again (ms), as it was notified, and its name
-- lock  start:<owner> time of the holder's start (µs), and its terms; until it releases the key
--
-- Terms: cost:limit,per,burst;limit,per,burst with per in µs, as in a want after its capacity.
-- USES records limits grants

local MOST_SERIES = 8 -- of different periods, at one key
local PARTS = 64 -- of a period; the starts of one part have one time
local CATCH_UP = 25000 -- µs: a start this late does not delay the next ones
local COMING = 1000000 -- µs until the next check, if reserved starts fill a rate

local log -- the starts of the current key

-- Returns the distance between starts (µs). Exactly per/limit would keep the period full, so each pause
-- would repeat every `per`. It is stretched by up to 3 %.
local function distance_of(per, limit)
    local more = math.min(math.floor(per * 3 / 100), 30000)
    return (per + more * (limit - 1) / limit) / limit
end

-- Returns for how long a start counts (µs). A task begins a little later than its claim.
local function counts_for(per)
    return per + math.min(math.floor(per / 200), 5000)
end

local function rates_of(terms)
    local cost, list = string.match(terms, '^(%d+):(.*)$')
    local rates = {}
    for limit, per, burst in string.gmatch(list or '', '(%d+),(%d+),(%d+)') do
        rates[#rates + 1] = { limit = tonumber(limit), per = tonumber(per), burst = tonumber(burst) }
    end
    return tonumber(cost or 0), rates
end

local function read_series(text, per)
    local numbers = {}
    for number in string.gmatch(text, '%d+') do
        numbers[#numbers + 1] = tonumber(number)
    end
    local series = { per = per, parts = {}, count = 0 }
    series.next, series.asked = numbers[1] or 0, numbers[2] or 0
    series.limit = math.max(1, numbers[3] or 1)
    if series.next > now + 2 * per then
        series.next = now + per -- the clock was set back
    end
    for i = 4, #numbers - 1, 2 do
        local last, count = math.min(numbers[i], now), numbers[i + 1]
        if last + counts_for(per) > now then
            series.parts[#series.parts + 1] = { last, count }
            series.count = series.count + count
        end
        series.ahead = series.ahead or numbers[i] > now
    end
    return series
end

local function write_series(series)
    local words = { integer(series.next), integer(series.asked), integer(series.limit) }
    for _, part in ipairs(series.parts) do
        words[#words + 1] = integer(part[1])
        words[#words + 1] = integer(part[2])
    end
    redis.pcall('HSET', RATE, 'p:' .. integer(series.per), table.concat(words, ' '))
end

-- Whether an owner has a grant, claimed or not.
local function has_something(owner)
    return (key.alone and key.alone.owner == owner) or redis.call('HEXISTS', LOCK, 'g:' .. owner) == 1
end

-- Undoes the delay that a cancelled start has added to the next one.
local function put_forward(terms)
    local cost, rates = rates_of(terms)
    for _, rate in ipairs(rates) do
        local series = log.series[rate.per]
        if series then
            series.next = math.max(0, series.next - cost * distance_of(rate.per, series.limit))
            write_series(series)
        end
    end
end

-- Reads the starts, and adds up the reserved ones. Removes rows without a grant.
local function read_rows()
    local fields, lapsed = redis.call('HGETALL', RATE), {}
    for i = 1, #fields, 2 do
        local per, owner = string.match(fields[i], '^p:([1-9]%d*)$'), string.match(fields[i], '^r:(.*)$')
        if per then
            local series = read_series(fields[i + 1], tonumber(per))
            log.series[series.per] = series
            if series.ahead then
                write_series(series)
            end
        elseif owner and has_something(owner) then
            log.reserved = log.reserved + rates_of(fields[i + 1])
        elseif owner then
            lapsed[#lapsed + 1] = { owner, fields[i + 1] }
        end
    end
    for _, each in ipairs(lapsed) do
        redis.call('HDEL', RATE, 'r:' .. each[1])
        put_forward(each[2])
    end
end

-- Removes some of the many rows of a key without a holder.
local function drop_rows()
    local found = redis.call('HSCAN', RATE, '0', 'COUNT', MANY)[2]
    for i = 1, #found, 2 do
        local owner = string.match(found[i], '^r:(.*)$')
        if owner and redis.call('HDEL', RATE, found[i]) == 1 then
            log.reserved = math.max(0, log.reserved - rates_of(found[i + 1]))
            put_forward(found[i + 1])
        end
    end
    redis.pcall('HSET', RATE, 'reserved', integer(log.reserved))
end

-- Reads the starts, and the sum of the reserved ones. An interrupted script may have left the sum too
-- high, until there are few rows again.
local function read_sums()
    local reserved, list = unpack(redis.call('HMGET', RATE, 'reserved', 'series'))
    local names = {}
    for per in string.gmatch(list or '', '[1-9]%d*') do
        names[#names + 1] = #names < MOST_SERIES and 'p:' .. per or nil
    end
    log.reserved, log.is_sum = known_number(reserved), true
    for number, text in ipairs(names[1] and redis.call('HMGET', RATE, unpack(names)) or {}) do
        local per = tonumber(string.sub(names[number], 3))
        log.series[per] = text and read_series(text, per) or nil
    end
    if not key.alone and key.count == 0 then
        drop_rows()
    end
end

local function read_log()
    if log and log.of == RATE then
        return
    end
    log = { of = RATE, series = {}, reserved = 0 }
    local many = redis.call('HLEN', RATE)
    if many > FEW then
        read_sums()
    elseif many > 0 then
        read_rows()
    end
end

local function list_series()
    local list = {}
    for _, series in ipairs(all_series()) do
        list[#list + 1] = integer(series.per)
    end
    return table.concat(list, ' ')
end

local function all_series()
    local found = {}
    for _, series in pairs(log.series) do
        found[#found + 1] = series
    end
    table.sort(found, function(one, other)
        return one.per < other.per
    end)
    return found
end

-- Returns the series of a rate. If the period is new, it is estimated from the other series.
local function series_of(rate)
    local per = rate.per
    local series = log.series[per]
    if series then
        return series
    end
    series = { per = per, next = 0, asked = now, limit = rate.limit, parts = {}, count = 0 }
    local known = all_series()
    local source = known[#known]
    for number = #known, 1, -1 do
        source = known[number].per >= per and known[number] or source
    end
    for _, part in ipairs(source and source.parts or {}) do
        if part[1] + counts_for(per) > now then
            series.parts[#series.parts + 1] = { part[1], part[2] }
            series.count = series.count + part[2]
        end
    end
    return series
end

-- Returns when the next start is due at this limit, if the series was written for another one.
local function next_by(rate, series)
    if rate.limit <= series.limit then
        return math.min(series.next, now) + math.max(0, series.next - now) * series.limit / rate.limit
    end
    local due, distance = 0, distance_of(rate.per, rate.limit) -- as if this limit had always applied
    for _, part in ipairs(series.parts) do
        due = math.max(due, part[1]) + part[2] * distance
    end
    if log.reserved > 0 then
        due = math.max(due, now) + log.reserved * distance
    end
    return math.min(series.next, due)
end

-- Returns in how many µs one rate allows a start; 0: now.
local function opens_for(rate, cost)
    local series = series_of(rate)
    local spaced = series.next - (rate.burst - 1) * distance_of(rate.per, series.limit) - now
    if rate.limit > series.limit then -- else next_by() yields nearly the same
        spaced = next_by(rate, series) - (rate.burst - 1) * distance_of(rate.per, rate.limit) - now
    end
    local over, at = series.count + log.reserved + cost - rate.limit, now
    for _, part in ipairs(series.parts) do
        if over <= 0 then
            break
        end
        over, at = over - part[2], part[1] + counts_for(rate.per)
    end
    if over > 0 then
        at = now + COMING
    end
    return math.max(0, spaced, at - now)
end

-- Returns the terms that apply to a want: an operator's rates replace its own. Nothing: no rates.
local function terms_for(want)
    local rates = limit_now().rates
    if not rates then
        return want.terms
    end
    local cost = tonumber(string.match(want.terms or '', '^(%d+):')) or 1
    for limit in string.gmatch(rates, '(%d+),%d+,%d+') do
        cost = math.min(cost, tonumber(limit)) -- a higher cost would never be admitted
    end
    return cost .. ':' .. rates
end

-- Returns in how many µs these terms allow a start; 0: now.
local function starts_by(terms)
    if not terms then
        return 0
    end
    read_log()
    local cost, rates = rates_of(terms)
    local wait = 0
    for _, rate in ipairs(rates) do
        wait = math.max(wait, opens_for(rate, cost))
    end
    return wait
end

local function forget_the_oldest_asked()
    local known = all_series()
    if #known <= MOST_SERIES then
        return
    end
    local oldest = known[1]
    for _, series in ipairs(known) do
        oldest = series.asked < oldest.asked and series or oldest
    end
    log.series[oldest.per] = nil
    redis.call('HDEL', RATE, 'p:' .. integer(oldest.per))
end

-- Keeps the record until its last start counts no longer, plus the time of messages in flight.
local function keep_log()
    local longest = 0
    for per in pairs(log.series) do
        longest = math.max(longest, per)
    end
    redis.call('PEXPIRE', RATE, math.ceil(longest / 1000) + 60000)
end

-- Schedules a start after the others, for a request that arrived at `came`.
local function space(terms, came)
    read_log()
    local cost, rates = rates_of(terms)
    for _, rate in ipairs(rates) do
        local series = series_of(rate)
        if not log.series[rate.per] then
            log.series[rate.per] = series
            redis.pcall('HSET', RATE, 'series', list_series()) -- first: a script may be interrupted
        end
        local since = math.max(math.min(came, now), now - CATCH_UP)
        series.next = math.max(next_by(rate, series), since) + cost * distance_of(rate.per, rate.limit)
        series.asked, series.limit = now, rate.limit
        write_series(series)
        forget_the_oldest_asked()
    end
end

-- Counts a start now, in every series.
local function count_start(owner, terms)
    local cost = rates_of(terms)
    for _, series in pairs(log.series) do
        local width, last = series.per / PARTS, series.parts[#series.parts]
        if last and math.floor(last[1] / width) == math.floor(now / width) then
            last[1], last[2] = now, last[2] + cost
        else
            series.parts[#series.parts + 1] = { now, cost }
        end
        series.count = series.count + cost
        write_series(series)
    end
    keep_log()
    redis.pcall('HSET', LOCK, 'start:' .. owner, integer(now) .. ' ' .. terms)
end

-- Counts a start of a caller that begins now, without a reservation.
local function start(owner, terms, came)
    space(terms, came)
    count_start(owner, terms)
end

local function reserve_start(owner, terms, came)
    space(terms, came)
    log.reserved = log.reserved + rates_of(terms)
    redis.pcall('HSET', RATE, 'r:' .. owner, terms, 'reserved', integer(log.reserved))
    keep_log()
end

local function keep_no_longer(owner, terms)
    redis.call('HDEL', RATE, 'r:' .. owner) -- first: the row may have lost its grant
    local is_read = log and log.of == RATE
    read_log()
    if is_read or log.is_sum then
        log.reserved = math.max(0, log.reserved - rates_of(terms))
    end
    if log.is_sum then
        redis.pcall('HSET', RATE, 'reserved', integer(log.reserved))
    end
end

-- Turns a reserved start into a start of `another`. Returns false if there was none.
local function begin_start(owner, another)
    local terms = redis.call('HGET', RATE, 'r:' .. owner)
    if not terms then
        return false
    end
    keep_no_longer(owner, terms)
    count_start(another, terms)
    return true
end

-- Stops counting the start of an owner whose task did not begin.
local function refund(owner)
    local at, terms = string.match(redis.call('HGET', LOCK, 'start:' .. owner) or '', '^(%d+) (.*)$')
    if not at then
        return
    end
    redis.call('HDEL', LOCK, 'start:' .. owner)
    read_log()
    local cost = rates_of(terms)
    for _, series in pairs(log.series) do
        for number, part in ipairs(series.parts) do
            if part[1] >= tonumber(at) then
                local counted = math.min(cost, part[2])
                part[2], series.count = part[2] - counted, series.count - counted
                if part[2] == 0 then
                    table.remove(series.parts, number)
                end
                break
            end
        end
        write_series(series)
    end
    put_forward(terms)
end

-- Releases the reserved start of an owner.
local function leave_start(owner)
    local terms = redis.call('HGET', RATE, 'r:' .. owner)
    if terms then
        keep_no_longer(owner, terms)
        put_forward(terms)
    end
end
