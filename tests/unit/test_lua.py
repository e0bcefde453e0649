from __future__ import annotations

import hashlib
import re
import uuid
from importlib.resources import files

import pytest

from celery_distlock.stores.redis import connections, scripts

NAMES = sorted(
    file.name.removesuffix(".lua")
    for file in files("celery_distlock.stores.redis.scripts").iterdir()
    if file.name.endswith(".lua")
)
LIBRARIES = [
    *("records", "limits", "grants", "rates", "gates", "lanes", "runs", "answers", "queue"),
    *("several", "calls"),
]
SCRIPTS = [name for name in NAMES if name not in LIBRARIES]


def own_text(name):
    return (files("celery_distlock.stores.redis.scripts") / f"{name}.lua").read_text()


def used_by(name):
    return scripts._used(name)


def code(name):
    return re.sub("--.*", "", own_text(name))


@pytest.fixture
def write_script(monkeypatch, tmp_path):
    monkeypatch.setattr(scripts, "files", lambda _package: tmp_path)

    def write(text):
        name = f"script_{uuid.uuid4().hex}"  # scripts are loaded once
        (tmp_path / f"{name}.lua").write_text(text.replace("NAME", name))
        return name

    return write


def test_every_header_parses():
    for name in NAMES:
        script = scripts.load(name)

        assert script.name == name
        assert script.keys, name
        assert len(set(script.keys)) == len(script.keys), name
        assert len(set(script.arguments)) == len(script.arguments), name


def test_every_header_says_what_the_script_does_and_returns():
    for name in SCRIPTS:
        assert re.match(rf"-- {name}\.lua: \S", own_text(name)), name
        assert re.search(r"^-- returns \S", own_text(name), re.MULTILINE), name


def test_the_header_names_the_arguments_as_the_code_does():
    for name in SCRIPTS:
        unpacked = re.search(r"local ([\w, ]+) = unpack\(ARGV\)", code(name))
        indexes = {int(index) for index in re.findall(r"ARGV\[(\d+)\]", code(name))}

        if unpacked:
            assert tuple(unpacked[1].split(", ")) == scripts.load(name).arguments, name
        else:
            assert indexes == set(range(1, len(scripts.load(name).arguments) + 1)), name


def test_the_header_names_every_key_that_is_used():
    for name in SCRIPTS:
        texts = own_text(name), *map(own_text, used_by(name))
        used = {int(index) for text in texts for index in re.findall(r"KEYS\[(\d+)\]", text)}

        assert used == set(range(1, len(scripts.load(name).keys) + 1)), name


def test_no_script_makes_up_a_key():
    # A cluster, and a proxy before one, route a script by the keys that it declares.
    named = {"LOCK", "QUEUE", "TASKS", "WOKEN", "FENCE", "DONE", "RETURNS", "KEYS[1]", "KEYS[2]"}
    named |= {"UNTIL", "FREE", "DUE", "TICKER", "RATE", "LANES", "LATER", "CALLS", "LEAVING"}
    named |= {"runs"}  # LATER or LEAVING
    for name in NAMES:
        calls = re.findall(r"redis\.p?call\('(\w+)'(?:, ([\w\[\]]+))?", code(name))

        assert calls or "\n-- USES " in own_text(name), name  # these do
        for command, first in calls:
            assert command not in {"KEYS", "SCAN", "FLUSHALL", "FLUSHDB", "EVAL"}, name
            assert command in {"TIME", "PUBLISH", "SPUBLISH"} or first in named, name


def test_no_script_uses_another_clock_than_the_servers():
    for name in NAMES:
        assert not re.search(r"os\.|math\.random", code(name)), name


def test_the_digest_is_that_of_the_whole_source():
    for name in SCRIPTS:
        script = scripts.load(name)

        assert script.sha == hashlib.sha1(script.source.encode()).hexdigest(), name


def test_every_line_that_does_something_is_there_in_its_order():
    for name in SCRIPTS:
        lines = [line for line in code(name).splitlines() if re.match(r"if |return |redis\.", line)]
        source = re.sub(r"--.*|\bF\d*\.", "", scripts.load(name).source).splitlines()

        assert lines, name
        assert [line for line in source if line in set(lines)] == lines, name


def test_every_function_is_needed():
    for name in SCRIPTS:
        source = re.sub("--.*", "", scripts.load(name).source)
        functions = re.findall(
            r"^(?!F_made)(\w+) = function|\bF_name == '(\w+)'", source, re.MULTILINE
        )
        functions = [at_once or when_called for at_once, when_called in functions]

        for function in functions:
            assert re.search(rf"\bF\d*\.{function}\b", source), name
        assert len(functions) == len(set(functions)), name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("return 1", "has no header"),
        ("-- NAME.lua: does it.\nreturn 1", "has no header"),
        ("-- KEYS lock\nreturn 1", "has no header"),
        ("-- other.lua: does it.\n-- KEYS lock\nreturn 1", "has no header"),
        ("-- KEYS lock\n-- NAME.lua: does it.\nreturn 1", "has no header"),
        ("", "has no header"),
    ],
)
def test_a_script_without_a_header_is_refused(write_script, text, said):
    with pytest.raises(ValueError, match=said):
        scripts.load(write_script(text))


LIBRARY = "-- NAME.lua: is used.\n-- KEYS lock\n\nlocal LOCK = KEYS[1]\n"


def test_a_script_that_names_other_keys_than_what_it_uses_is_refused(write_script):
    library = write_script(LIBRARY)
    user = write_script(f"-- NAME.lua: uses.\n-- KEYS queue\n-- USES {library}\nreturn 1")

    with pytest.raises(ValueError, match=f"uses {library}.lua and names other KEYS"):
        scripts.load(user)


def test_what_a_script_needs_comes_before_it_and_nothing_else_does(write_script):
    library = write_script(
        LIBRARY
        + """local OTHER = 'KEY'
-- Counts.
local function one()
    return 1 -- two() is for others
end
local log -- of all

local function two()
    log = one() + 1
    return log
end
local function three()
    return 'three()' .. OTHER
end
"""
    )
    user = write_script(
        f"""-- NAME.lua: uses.
-- KEYS lock
-- ARGV a [b c]
-- USES {library}

if ARGV[1] == '' then
    return LOCK
end

-- What others would.
local function four()
    return two()
end
return four()
"""
    )

    script = scripts.load(user)

    assert script.source == (
        """local LOCK = KEYS[1]
if ARGV[1] == '' then
    return LOCK
end

local log -- of all

local F1
F1 = {
-- Counts.
one = function()
    return 1 -- two() is for others
end,
two = function()
    log = F1.one() + 1
    return log
end,
-- What others would.
four = function()
    return F1.two()
end,
}
return F1.four()
"""
    )
    assert (script.keys, script.arguments) == (("lock",), ("a", "b", "c"))
    assert script.required == 1


def test_a_variable_that_is_computed_stays_where_it_is(write_script):
    text = "-- NAME.lua: does.\n-- KEYS lock\n\nlocal a = f()\nlocal b = a\na = 2\nreturn b\n"

    assert scripts.load(write_script(text)).source.endswith(text.partition("\n\n")[2])


def test_a_name_that_is_defined_twice_is_refused(write_script):
    library = write_script(LIBRARY + "local function one()\n    return 1\nend\n")
    user = write_script(
        f"-- NAME.lua: uses.\n-- KEYS lock\n-- USES {library}\n\nlocal a, one = f()\nreturn one\n"
    )

    with pytest.raises(ValueError, match=rf"{user}.lua defines twice: one"):
        scripts.load(user)


def test_what_is_defined_only_by_what_needs_it_is_refused(write_script):
    text = "-- NAME.lua: does.\n-- KEYS lock\n\nlocal function f()\n    return g()\nend\n"
    text += "local function g()\n    return f()\nend\nreturn g()\n"

    with pytest.raises(ValueError, match="needs itself for: "):
        scripts.load(write_script(text))


def test_a_variable_with_the_name_of_a_function_is_refused(write_script):
    library = write_script(LIBRARY + "local function f()\n    return 1\nend\n")
    text = f"-- NAME.lua: does.\n-- KEYS lock\n-- USES {library}\n\n"
    text += "local function g(f)\n    return f\nend\nreturn f() + g(1)\n"

    with pytest.raises(ValueError, match="a variable is called as a function is: f"):
        scripts.load(write_script(text))


MANY = "".join(f"local function {'f' * number}()\n    return 1\nend\n" for number in range(1, 14))
ALL = " + ".join(f"{'f' * number}()" for number in range(1, 14))


def test_of_many_functions_each_is_made_when_it_is_called(write_script):
    library = write_script(
        LIBRARY
        + MANY
        + """local TWO = 2 -- of something
local log
local function it()
    log = TWO
    return log
end
local function other()
    return it()
end
"""
    )
    user = write_script(
        f"-- NAME.lua: uses.\n-- KEYS lock\n-- USES {library}\n\n"
        f"local x = it()\nlocal function own()\n    return other()\nend\nreturn own() + {ALL}\n"
    )

    source = scripts.load(user).source

    assert source.startswith(
        """local log
local F0
F0 = {
it = function()
    log = (2)
    return log
end,
}
local x = F0.it()
local F
local F_begin = function()
F = setmetatable({
}, { __index = function(_, F_name)
local F_made
if #F_name < 7 then
"""
    )
    assert (
        """if F_name == 'fffff' then
F_made = function()
    return 1
end
elseif F_name == 'other' then
F_made = function()
    return F0.it()
end
end
"""
        in source
    )
    assert source.endswith(f"return F.own() + {ALL.replace('f', 'F.f', 1).replace(' f', ' F.f')}\n")


def source_of_many(write_script, *headers: str) -> str:
    """Return the source of a script with these headers that calls all of many functions."""
    library = write_script(LIBRARY + MANY)
    lines = "\n".join(["-- NAME.lua: uses.", "-- KEYS lock", f"-- USES {library}", *headers])
    return scripts.load(write_script(f"{lines}\n\nreturn {ALL}\n")).source


def test_those_that_are_needed_often_are_made_together(write_script):
    source = source_of_many(write_script, "-- OFTEN fff", "-- OFTEN ff")

    assert (
        """F = setmetatable({
ff = function()
    return 1
end,
fff = function()
    return 1
end,
}, { __index = function(_, F_name)
"""
        in source
    )
    assert "'fff'" not in source


def test_those_that_the_first_of_them_needs_are_made_with_it(write_script):
    source = source_of_many(
        write_script, "-- OFTEN ff", "-- TOGETHER fff ff f g", "-- TOGETHER g f"
    )

    assert (
        """if F_name == 'fff' then
F_made = function()
    return 1
end
F.f = function()
    return 1
end
"""
        in source
    )
    assert source.count("F.f = ") == 1
    assert source.count("F.ff = ") == 0


def test_an_unknown_function_that_is_needed_often_is_refused(write_script):
    library = write_script(LIBRARY + MANY)
    user = write_script(
        f"-- NAME.lua: uses.\n-- KEYS lock\n-- USES {library}\n-- OFTEN fff g\n\nreturn {ALL}\n"
    )

    with pytest.raises(ValueError, match=f"{user}.lua has no such function: g"):
        scripts.load(user)


def test_a_function_that_needs_what_is_computed_later_is_refused(write_script):
    library = write_script(LIBRARY + MANY)
    user = write_script(
        f"-- NAME.lua: uses.\n-- KEYS lock\n-- USES {library}\n\n"
        f"local x = {ALL} + 1\nlocal y = g()\nlocal function h()\n    return y\nend\nreturn h()\n"
    )

    with pytest.raises(ValueError, match=f"{user}.lua needs before it is computed: y"):
        scripts.load(user)


def test_every_constant_that_is_used_is_defined():
    for name in SCRIPTS:
        source = re.sub("--.*|'[^'\n]*'", "", scripts.load(name).source)
        defined = re.findall(r"local ([A-Z_, ]+) =", source)
        names = {each for line in defined for each in line.split(", ")} | {"KEYS", "ARGV"}

        assert set(re.findall(r"\b[A-Z][A-Z_]+\b", source)) <= names, name


def test_a_script_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        scripts.load("no_such_script")


@pytest.mark.parametrize(
    "stems", [("d:{k}:",), ("d:{a}:", "d:{b\u20ac}:"), ("d:{\udcff\u20ac}:",), ("",)]
)
def test_the_names_of_records_are_sent_with_their_lengths_in_bytes(stems):
    script = scripts.load("send")

    first, head, words = connections._script_head(script, stems)

    names = [f"{stem}{record}" for stem in stems for record in script.keys]
    raw = [
        name.encode("utf-8", "surrogateescape")
        for name in ("EVALSHA", script.sha, str(len(names)), *names)
    ]
    assert first == raw[3]
    assert head == b"".join(b"$%d\r\n%b\r\n" % (len(each), each) for each in raw)
    assert words == len(raw)
