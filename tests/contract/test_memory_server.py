"""The server in this process answers as a real one: every command, and every script."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from contextlib import closing
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.memory.commands import COMMANDS
from celery_distlock.stores.redis.connections import command, script_call
from celery_distlock.stores.redis.scripts import Script
from celery_distlock.stores.redis.store import RedisStore
from tests import servers
from tests.schedules import schedules

NAMES = st.sampled_from(["k", "k", "k", "other"])
WORDS = st.sampled_from([b"a", b"b", b"c", b"", b"A", b"a*", b"[x]", b"\\", b"\xff\x00", b"b:1"])
TEXTS = ("", "A", "a", "a b", "a!", "aa", "b", "b:1", "\N{SNOWMAN}")
PATTERNS = st.sampled_from(
    [
        *(b"*", b"a*", b"?", b"[ab]", b"[^a]", b"\\*", b"a\\*", b"[a-c]", b"\\[x\\]", b"[", b""),
        *(b"b:*", b"*1", b"**", b"[]", b"[x", b"[\\]x]", b"x[^", b"*\xff*", b"\\"),
    ]
)
NUMBERS = st.one_of(
    st.integers(-3, 3).map(str),
    st.integers(-(2**53), 2**53).map(str),
    st.sampled_from(
        ["0.5", "-1.25", "1e3", "inf", "-inf", "+inf", "nan", "", " 1", "1 ", "x", "1_0"]
    ),
)
INTEGERS = st.one_of(
    st.integers(-4, 4).map(str),
    st.sampled_from(["", "x", "1.0", "01", "+1", "-0", str(2**63 - 1), str(-(2**63)), str(2**63)]),
)
# Of a bound that begins with a blank, older servers take the number, and newer ones refuse it.
_BOUNDS = NUMBERS.filter(lambda number: not number.startswith(" "))
BOUNDS = st.one_of(_BOUNDS, _BOUNDS.map(lambda number: f"({number}"))
MILLISECONDS = st.sampled_from(
    ["60000", "0", "-1", "1.5", "x", "", str(2**63 - 1), str(-(2**63)), "9" * 30]
)
LIMITS = st.tuples(st.just("LIMIT"), INTEGERS, INTEGERS)
NX_XX = st.lists(st.sampled_from(["NX", "XX", "nx"]), max_size=2)


def words(*parts: Any) -> st.SearchStrategy[list[Any]]:
    """A command of these parts: a word, a strategy of one, or of several."""
    strategies = [each if isinstance(each, st.SearchStrategy) else st.just(each) for each in parts]
    return st.tuples(*strategies).map(
        lambda found: [
            word for part in found for word in (part if isinstance(part, list | tuple) else [part])
        ]
    )


def some(strategy: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[list[Any]]:
    return st.lists(strategy, min_size=least, max_size=3)


def options(*choices: Any) -> st.SearchStrategy[list[Any]]:
    each = [one if isinstance(one, st.SearchStrategy) else st.just(one) for one in choices]
    named = st.one_of(each).map(lambda part: [part] if isinstance(part, str) else list(part))
    once = st.lists(named, max_size=3, unique_by=lambda part: part[0].upper())
    return once.map(lambda found: list(itertools.chain(*found)))


PAIRS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3).map(
    lambda pairs: list(itertools.chain(*pairs))
)
SCORED = st.lists(st.tuples(NUMBERS, WORDS), min_size=1, max_size=3).map(
    lambda pairs: list(itertools.chain(*pairs))
)
SCANNED = options(st.tuples(st.just("MATCH"), PATTERNS), st.tuples(st.just("COUNT"), INTEGERS))

COMMAND = st.one_of(
    *(words("HSET", NAMES, PAIRS), words("HSET", NAMES, some(WORDS)), words("HGET", NAMES, WORDS)),
    *(words("HMGET", NAMES, some(WORDS)), words("HGETALL", NAMES), words("HEXISTS", NAMES, WORDS)),
    *(words("HLEN", NAMES), words("HDEL", NAMES, some(WORDS)), words("HSCAN", NAMES, "0", SCANNED)),
    *(words("HSET", NAMES, WORDS, NUMBERS), words("HINCRBYFLOAT", NAMES, WORDS, NUMBERS)),
    *(words("ZADD", NAMES, NX_XX, SCORED), words("ZADD", NAMES, some(NUMBERS))),
    *(words("ZREM", NAMES, some(WORDS)), words("ZSCORE", NAMES, WORDS), words("ZCARD", NAMES)),
    *(words("ZRANK", NAMES, WORDS), words("ZREMRANGEBYSCORE", NAMES, BOUNDS, BOUNDS)),
    words("ZRANGE", NAMES, INTEGERS, INTEGERS, options("WITHSCORES", "REV", LIMITS, "withscores")),
    words("ZRANGE", NAMES, BOUNDS, BOUNDS, "BYSCORE", options("WITHSCORES", "REV", LIMITS)),
    words("ZCOUNT", NAMES, BOUNDS, BOUNDS),
    words("ZRANGEBYSCORE", NAMES, BOUNDS, BOUNDS, options("WITHSCORES", LIMITS, "x")),
    words("ZSCAN", NAMES, "0", SCANNED),
    words(
        "SET",
        *(NAMES, WORDS),
        options("NX", "XX", "GET", "px", st.tuples(st.just("PX"), MILLISECONDS)),
    ),
    *(words("GET", NAMES), words("DEL", some(NAMES)), words("EXISTS", some(NAMES))),
    *(words("PEXPIRE", NAMES, MILLISECONDS), words("EXPIRE", NAMES, MILLISECONDS)),
    *(words("PTTL", NAMES), words("DEL", NAMES), words("PING", some(WORDS)), words("TIME")),
    *(words("PUBLISH", WORDS, WORDS), words("SPUBLISH", WORDS, WORDS)),
    words(st.sampled_from(sorted(each.decode() for each in COMMANDS)), st.lists(WORDS, max_size=1)),
)


class Both:
    """Sends a request to both servers and compares their answers."""

    def __init__(self, redis_url: str, prefix: str) -> None:
        self._prefix = prefix
        self._world = itertools.count()
        self._stores = RedisStore(redis_url, prefix), MemoryStore("memory://", prefix)

    def begin(self) -> None:
        """Take other keys, which are not there."""
        self._stem = f"{self._prefix}:{next(self._world)}:"

    def close(self) -> None:
        for store in self._stores:
            store.close()

    def named(self, parts: list[Any]) -> list[Any]:
        return [f"{self._stem}{each}" if each in ("k", "other") else each for each in parts]

    def ask(self, parts: list[Any]) -> Any:
        return self._compare(command(b"", *self.named(parts)), parts)

    def run(self, source: str, *arguments: Any) -> Any:
        sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        script = Script("t", ("k", "other"), (), 0, source, sha)
        return self._compare(script_call(script, (self._stem,), *arguments), ["script"])

    def _compare(self, call: Any, parts: list[Any]) -> Any:
        real, ours = (comparable(parts[0].upper(), each) for each in self.answers(call))
        assert ours == real, parts
        return real

    def answers(self, call: Any) -> list[Any]:
        return [store._servers.exchange([call], 5.0)[0] for store in self._stores]


def comparable(name: str, answer: Any) -> Any:
    """Return an answer without what two servers need not agree on."""
    if isinstance(answer, Exception):
        return type(answer)  # of several complaints each server makes the one that it finds first
    if name == "TIME":
        return [type(part) for part in answer]
    if name == "PTTL" and answer > 0:
        return math.ceil(answer / 5000)
    if name in ("HGETALL", "HSCAN", "ZSCAN"):
        pairs = answer if name == "HGETALL" else answer[1]
        return sorted(zip(pairs[::2], pairs[1::2], strict=True))
    if name == "HINCRBYFLOAT":  # which a server computes with more bits
        return pytest.approx(float(answer), rel=1e-12)
    return answer


def shortened(said: str) -> str:
    """Return what a server says, without where in a script, and without what it was asked."""
    return said.partition(" script: ")[0].partition(", with args")[0].removeprefix("ERR ")


@pytest.fixture(scope="module")
def both(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        if client.info("server")["redis_version"].startswith("6."):
            pytest.skip("it answers as servers from Redis 7.0 on do")
    prefix = servers.new_prefix()
    both = Both(redis_url, prefix)
    yield both
    both.close()
    servers.delete_keys(redis_url, prefix)


@given(st.lists(COMMAND, min_size=1, max_size=30))
@schedules(300, steps=1)
def test_commands_are_answered_alike(both, commands):
    both.begin()
    for parts in commands:
        both.ask(parts)
    for name in ("k", "other"):
        both.ask(["DEL", name])


def test_members_with_one_score_are_found_by_their_text(both):
    both.begin()
    both.ask(["ZADD", "k", *itertools.chain(*(("0", each) for each in TEXTS))])
    bounds = [(how, text) for how in ("[", "(") for text in (*TEXTS, "bb")]

    for low, high in itertools.product(bounds, repeat=2):
        between = ["k", "".join(low), "".join(high)]
        both.ask(["ZLEXCOUNT", *between])
        both.ask(["ZRANGE", *between, "BYLEX"])
        both.ask(["ZRANGE", *between, "BYLEX", "LIMIT", "1", "2"])
        both.ask(["ZRANGE", *between, "BYLEX", "REV"])
    for wrong in ("", "x", "x("):
        both.ask(["ZLEXCOUNT", "k", "[a", wrong])
        both.ask(["ZRANGE", "k", wrong, "[a", "BYLEX"])
    both.ask(["ZLEXCOUNT", "other", "[a", "[b"])


@pytest.mark.parametrize("many", [3, 300])
def test_members_with_one_score_are_found_before_others_that_come_later_by_their_text(both, many):
    both.begin()
    waiters = [f"w{number:03}" for number in range(many)]
    lanes = itertools.chain(*((str(many + 1 - number), f"y{number:03}") for number in range(many)))
    both.ask(["ZADD", "k", "1", "x", *lanes])
    bounds = [
        how + text for how in ("[", "(") for text in ("v", waiters[1], waiters[-1], "w!", "wz")
    ]

    for members in ([], waiters):
        if members:
            both.ask(["ZADD", "k", *itertools.chain(*(("0", each) for each in members))])
        for low, high in itertools.product(bounds, repeat=2):
            both.ask(["ZLEXCOUNT", "k", low, high])
            both.ask(["ZRANGE", "k", low, high, "BYLEX", "LIMIT", "0", "2"])
            both.ask(["ZRANGE", "k", low, high, "BYLEX", "LIMIT", "1", "400"])


@pytest.mark.parametrize(
    "refused",
    [
        *(["HGET", "k", "a"], ["SET", "k", "1", "GET"], ["PEXPIRE", "k", "1.5"]),
        *(["ZADD", "k", "x", "a"], ["ZRANGE", "k", "x", "1"], ["HINCRBYFLOAT", "other", "a", "x"]),
        ["HINCRBYFLOAT", "other", "a", "inf"],
        *(
            ["HSET", "k"],
            ["HSET", "other", "a", "1", "b"],
            ["NO", "k"],
            ["SET", "other", "1", "PX", "0"],
        ),
        ["ZCOUNT", "k", "x", "1"],
        ["ZRANGEBYSCORE", "k", "x", "1"],
    ],
    ids=" ".join,
)
def test_refusals_are_worded_alike(both, refused):
    both.begin()
    both.ask(["ZADD", "k", "1", "a"])

    said = [shortened(str(answer)) for answer in both.answers(command(b"", *both.named(refused)))]

    assert said[0] == said[1]


@pytest.mark.parametrize(
    "source",
    [
        *("return 1.9", "return -1.9", "return true", "return false", "return nil", "return 'a'"),
        *("return {}", "return {1, 'a', {2, {}}}", "return {1, nil, 2}", "return {1, false, 2}"),
        *("return {ok = 'fine'}", "return {err = 'ERR no'}", "return {err = 'OOM no'}"),
        *("return {a = 1}", "return {1, a = 2}", "return 2^53", "return 1e15 + 0.5"),
        *("return redis.call('SET', KEYS[1], 'a')", "return redis.call('PING').ok"),
        *("return redis.call('GET', KEYS[1]) == false", "return redis.call('HLEN', KEYS[1])"),
        "return type(redis.call('HMGET', KEYS[1], 'a', 'b')[2])",
        "return redis.call('HMGET', KEYS[1], 'a', 'b')",
        "return redis.call('NO', KEYS[1])",
        "return redis.call('HSET', KEYS[1])",
        "return type(redis.pcall('HSET', KEYS[1]).err)",
        "return redis.pcall('HSET', KEYS[1])",
        "redis.call('SET', KEYS[1], 1) return redis.call('HGET', KEYS[1], 'a')",
        "redis.call('SET', KEYS[1], 1) return redis.pcall('HGET', KEYS[1], 'a')",
        "redis.call('SET', KEYS[1], 'x', 'PX', 5000) return redis.call('PTTL', KEYS[1])",
        "local ok, why = pcall(redis.call, 'HSET', KEYS[1]) return {tostring(ok), type(why)}",
        "made = 1",
        "return made",
        "return type(redis.nothing)",
        "error('on purpose')",
        "return nil + 1",
        "return {#KEYS, #ARGV, KEYS[1] == KEYS[2], ARGV[1], ARGV[2], ARGV[3]}",
        (
            "redis.call('HSET', KEYS[1], 'a', 1, 'b', 0.5, 'c', 1e15, 'd', -3, 'e', 2^53) "
            "return redis.call('HGETALL', KEYS[1])"
        ),
        (
            "redis.call('ZADD', KEYS[1], 1795842850523499, 'a') "
            "return redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')"
        ),
        (
            "redis.call('ZADD', KEYS[1], '1795842850523.00000012345', 'a') "
            "return tonumber(redis.call('ZSCORE', KEYS[1], 'a')) == 1795842850523.00000012345"
        ),
        "return tostring(0.1) .. tostring(1e15) .. tostring(2^53) .. tostring(1/3)",
        "return string.format('%.17g %d %.0f %.11f', 0.1, 3, 2^53, 1795842850523.25)",
        (
            "local sum = 0 for _, each in pairs(cjson.decode(ARGV[3])) do sum = sum + each end "
            "return tostring(sum)"
        ),
        "return cjson.encode({a = math.huge})",
        "return cjson.encode({0 / 0})",
        "local found = cjson.decode(ARGV[4]) return {found.a, found.b[2], found.c.d, #found.b}",
        "return unpack({1, 2})",
        "local time = redis.call('TIME') return {#time, type(time[1]), #time[2] <= 6 and 1 or 0}",
        "return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', math.huge)",
        "return redis.call('PUBLISH', KEYS[1], 'a')",
    ],
)
def test_scripts_are_executed_alike(both, source):
    both.begin()

    written = b'{"a": "\xff\\u00e9\\n", "b": [1, "2"], "c": {"d": "1795842850523499"}}'
    both.run(source, "\xff".encode("latin-1"), -1.5, '{"a": 1.5, "b": 2}', written)


@pytest.mark.parametrize(
    "value",
    [
        *("{}", "{1, 2, 3}", "{a = {b = {{c = 1}, {c = 2}}}}", "{a = true, b = false}", "ARGV[1]"),
        *("2^53", "123456789012345", "-1795842850523499", "0.1", "1/3", "1e300", "1e14", "-0.5"),
    ],
)
def test_values_are_written_alike(both, value):
    both.begin()
    sha = hashlib.sha1(value.encode(), usedforsecurity=False).hexdigest()
    script = Script("t", ("k", "other"), (), 0, f"return cjson.encode({value})", sha)
    every_byte = bytes(range(256)) + '\u2028 \N{SNOWMAN} " \\ / </'.encode()

    answers = both.answers(script_call(script, ("k",), every_byte))

    real, ours = (json.loads(answer.decode("utf-8", "surrogateescape")) for answer in answers)
    assert ours == real
    if value == "ARGV[1]":
        assert ours.encode("utf-8", "surrogateescape") == every_byte


def test_a_script_ends_at_its_first_error_and_keeps_what_it_wrote(both):
    both.begin()
    both.run(
        "redis.call('SET', KEYS[1], 1) redis.call('HGET', KEYS[1], 1) redis.call('DEL', KEYS[1])"
    )

    assert both.ask(["GET", "k"]) == b"1"


def test_time_stops_within_a_script():
    with closing(MemoryStore("memory://", "t")) as store:
        source = "local function now() return redis.call('TIME')[2] end local before = now()"
        source += " for i = 1, 1e6 do end return {before, now()}"
        call = script_call(Script("t", ("k",), (), 0, source, "sha"), ("k",))
        ((before, after),) = store._servers.exchange([call], 5.0)

    assert before == after
