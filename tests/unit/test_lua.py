from __future__ import annotations

import hashlib
import re
import uuid
from importlib.resources import files

import pytest

from celery_distlock.stores.redis import scripts

NAMES = sorted(
    file.name.removesuffix(".lua")
    for file in files("celery_distlock.stores.redis.scripts").iterdir()
    if file.name.endswith(".lua")
)
LIBRARIES = [
    *("grant", "rates", "units", "times", "queue", "handing", "coming"),
    *("lining", "calls", "limits"),
]
SCRIPTS = [name for name in NAMES if name not in LIBRARIES]
each_script = pytest.mark.parametrize("name", SCRIPTS)


def own_text(name):
    return (files("celery_distlock.stores.redis.scripts") / f"{name}.lua").read_text()


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


@pytest.mark.parametrize("name", NAMES)
def test_every_header_parses(name):
    script = scripts.load(name)

    assert script.name == name
    assert script.keys
    assert len(set(script.keys)) == len(script.keys)
    assert len(set(script.arguments)) == len(script.arguments)


@each_script
def test_every_header_says_what_the_script_does_and_returns(name):
    assert re.match(rf"-- {name}\.lua: \S", own_text(name))
    assert re.search(r"^-- returns \S", own_text(name), re.MULTILINE)


@each_script
def test_the_header_names_the_arguments_as_the_code_does(name):
    unpacked = re.search(r"local ([\w, ]+) = unpack\(ARGV\)", code(name))
    indexes = {int(index) for index in re.findall(r"ARGV\[(\d+)\]", code(name))}

    if unpacked:
        assert tuple(unpacked[1].split(", ")) == scripts.load(name).arguments
    else:
        assert indexes == set(range(1, len(scripts.load(name).arguments) + 1))


@each_script
def test_the_header_names_every_key_that_is_used(name):
    script = scripts.load(name)
    used = {int(index) for index in re.findall(r"KEYS\[(\d+)\]", script.source)}

    assert used == set(range(1, len(script.keys) + 1))


@pytest.mark.parametrize("name", NAMES)
def test_no_script_makes_up_a_key(name):
    # A cluster, and a proxy before one, route a script by the keys that it declares.
    named = {"LOCK", "QUEUE", "TASKS", "WOKEN", "FENCE", "DONE", "RETURNS", "KEYS[1]", "KEYS[2]"}
    named |= {"UNTIL", "FREE", "DUE", "TICKER", "RATE", "LATER", "CALLS"}
    calls = re.findall(r"redis\.p?call\('(\w+)'(?:, ([\w\[\]]+))?", code(name))

    assert calls or "-- USES queue" in own_text(name)  # which does it all
    for command, first in calls:
        assert command not in {"KEYS", "SCAN", "FLUSHALL", "FLUSHDB", "EVAL"}
        assert command in {"TIME", "PUBLISH", "SPUBLISH"} or first in named


@pytest.mark.parametrize("name", NAMES)
def test_no_script_uses_another_clock_than_the_servers(name):
    assert not re.search(r"os\.|math\.random", code(name))


@each_script
def test_the_digest_is_that_of_the_whole_source(name):
    script = scripts.load(name)

    assert script.sha == hashlib.sha1(script.source.encode()).hexdigest()
    assert script.source.endswith(own_text(name).rpartition("-- USES ")[2].partition("\n")[2])


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


LIBRARY = "-- NAME.lua: is used.\n-- KEYS lock\nlocal LOCK = KEYS[1]\n"


def test_a_script_that_names_other_keys_than_what_it_uses_is_refused(write_script):
    library = write_script(LIBRARY)
    user = write_script(f"-- NAME.lua: uses.\n-- KEYS queue\n-- USES {library}\nreturn 1")

    with pytest.raises(ValueError, match=f"uses {library}.lua and names other KEYS"):
        scripts.load(user)


def test_what_a_script_uses_is_put_where_it_says_so(write_script):
    library = write_script(LIBRARY)
    user = write_script(
        f"-- NAME.lua: uses.\n-- KEYS lock\n-- ARGV a [b c]\n-- USES {library}\nreturn LOCK"
    )

    script = scripts.load(user)

    assert script.source.endswith("\nlocal LOCK = KEYS[1]\nreturn LOCK")
    assert (script.keys, script.arguments) == (("lock",), ("a", "b", "c"))
    assert script.required == 1


@each_script
def test_every_constant_that_is_used_is_defined(name):
    source = re.sub("--.*|'[^'\n]*'", "", scripts.load(name).source)
    defined = re.findall(r"local ([A-Z_, ]+) =", source)
    names = {each for line in defined for each in line.split(", ")} | {"KEYS", "ARGV"}

    assert set(re.findall(r"\b[A-Z][A-Z_]+\b", source)) <= names


def test_a_script_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        scripts.load("no_such_script")
