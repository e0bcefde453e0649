-- answers.lua: the answers of scripts: a status, or a `reply`: a list of a JSON object and envelopes. The
-- object has status and further fields; woken: runs that the caller must send, each with the number of
-- its key, and the envelopes in the same order; opens_ms: in how many ms the key must be checked, because
-- time alone will admit a waiter.
-- KEYS lock queue tasks woken fence done rate lanes
-- USES records grants gates

local woken = {} -- runs that the caller must send
local envelopes = {} -- of these runs

-- Adds a run that the caller must send.
local function note_woken(run, envelope, more)
    local entry = more or {}
    entry.run, entry.key = run, key.number
    woken[#woken + 1], envelopes[#envelopes + 1] = entry, envelope
end

-- Notes in how many ms the key must be checked.
local function note_look(ms)
    key.opens_ms = math.ceil(math.min(key.opens_ms or NEVER, ms))
end

-- Returns a reply with these fields. The envelopes are outside the JSON: they may be large, and contain
-- any bytes.
local function reply(fields)
    fields.opens_ms = key.opens_ms
    if woken[1] then
        fields.woken = woken
    end
    return { named(fields), unpack(envelopes) }
end

-- Returns a status, and what a holder's grant lets others know: see a_holder().
local function with_holder(status, holder, run, ttl_ms)
    return { status = status, token = key.token, holder = holder, run = run, ttl_ms = ttl_ms }
end

-- Returns the status alone if there is nothing else to report.
local function answer(status)
    return (woken[1] or key.opens_ms) and reply({ status = status }) or status
end

-- Returns the answer to a request that was granted a share, or that has waited.
local function answer_granted(token, slot, waited_for)
    if woken[1] or key.opens_ms then
        return reply({ status = 'granted', token = token, slot = slot, waited_for = waited_for })
    end
    return { 'granted', token, slot, waited_for }
end
