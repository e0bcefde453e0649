-- answers.lua: what a script tells its caller beside a status: the runs that are to be sent, and when time
-- alone lets somebody enter.
-- KEYS lock queue tasks woken fence done rate
-- USES records grants gates

local woken = {} -- of the answer: the runs that its reader is to send, each with what it has to know
local envelopes = {} -- theirs

-- Has the reader of the answer send a run.
local function note_woken(run, envelope, more)
    local entry = more or {}
    entry.run, entry.key = run, key.number
    woken[#woken + 1], envelopes[#envelopes + 1] = entry, envelope
end

-- Notes in how many ms somebody may enter by time alone.
local function note_look(ms)
    key.opens_ms = math.ceil(math.min(key.opens_ms or NEVER, ms))
end

-- Returns an answer of named fields, with the runs that its reader is to send. Their envelopes come
-- after it: they may be large, and of any bytes.
local function reply(fields)
    fields.opens_ms = key.opens_ms
    if woken[1] then
        fields.woken = woken
    end
    return { named(fields), unpack(envelopes) }
end

-- Returns a status alone, where there is no more to say.
local function answer(status)
    return (woken[1] or key.opens_ms) and reply({ status = status }) or status
end

-- Returns the answer to a request that was granted a part of the key.
local function answer_granted(token, slot)
    if woken[1] or key.opens_ms then
        return reply({ status = 'granted', token = token, slot = slot })
    end
    return { 'granted', token, slot }
end
