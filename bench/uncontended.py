"""Taking a free lock and giving it up, and taking one again that is held already."""

import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import redis
from cpu_time import server_cpu
from figures import Figure, Part, Row, in_turn, median, ratio
from locks import BARE, OURS, adapter, open_lock, present
from parsers import HIREDIS, PYTHON, has_hiredis, measured

from celery_distlock.testing import EmbeddedServer

PAIRS = 200  # acquire + release in one round
TIMES = 5  # as many rounds; short ones, since the differences are small
AGAIN = "again"
GOALS = (0.88, 1.00)  # of time / bare lock: without hiredis, and with it
COLUMNS = ["median", "commands executed", "CPU of the server"]
NOT_THEIRS = {"cmdstat_info", "cmdstat_ping"}  # ours, to look; and what keeps subscriptions alive


NO_RE_ENTRY = "Only celery-distlock's lock can be acquired again by its holder."
NO_HIREDIS = "hiredis is not installed, so nothing was measured with it."


def uncontended(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    locks, absent = present()
    found = _of_parser(PYTHON, server.url, rounds)
    faster = _of_parser(HIREDIS, server.url, rounds) if has_hiredis() else {}
    times, faster_times = seconds_of(found), seconds_of(faster)

    def row(name: str, shown: str, terms: str, goals: tuple[float, float] | None = None) -> Row:
        at_most, with_hiredis = goals or (None, None)
        cost: Figure | str = "-"
        if faster:
            cost = Figure(ratio(faster_times[name], faster_times[BARE]), at_most=with_hiredis)
        pure = Figure(ratio(times[name], times[BARE]), at_most=at_most)
        return Row(shown, pure, [cost, *figures_of(found[name]), terms])

    ours, *others = locks
    shown = adapter(ours).NAME
    yield Part(
        "uncontended",
        "Acquire + release of a free lock",
        "time / bare lock",
        ["with hiredis", *COLUMNS, "terms"],
        [
            row(ours, shown, adapter(ours).TERMS, GOALS),
            row(AGAIN, f"{shown}, held already", "no round trip"),
            *(row(name, adapter(name).NAME, adapter(name).TERMS) for name in others),
        ],
        [*absent, *([] if faster else [NO_HIREDIS]), NO_RE_ENTRY],
    )


def _of_parser(parser: str, url: str, rounds: int) -> "dict[str, list[Pair]]":
    found = measured(parser, url, rounds)
    return {name: [Pair(*pair) for pair in pairs] for name, pairs in found.items()}


def measure(url: str, rounds: int) -> "dict[str, list[Pair]]":
    """Measure the locks in this process."""
    locks, _ = present()
    free = {name: open_lock(name, url, "free") for name in locks}
    return in_pairs(url, {**free, AGAIN: _held(url)}, rounds)


class Pair(NamedTuple):
    """What one acquire + release takes."""

    seconds: float
    commands: float  # that the server executes, those that scripts call among them
    cpu: float  # seconds of the server's


class Pairs:
    """Times acquire + release of one lock."""

    def __init__(self, lock: Any, client: redis.Redis) -> None:
        self._lock = lock
        self._client = client

    def __call__(self) -> Pair:
        acquire, release = self._lock.acquire, self._lock.release
        commands, cpu = self._look()
        begin = time.perf_counter()
        for _ in range(PAIRS):
            acquire()
            release()
        took = time.perf_counter() - begin
        more, later = self._look()
        return Pair(took / PAIRS, (more - commands) / PAIRS, (later - cpu) / PAIRS)

    def _look(self) -> tuple[int, float]:
        stats = self._client.info("commandstats")
        executed = sum(of["calls"] for name, of in stats.items() if name not in NOT_THEIRS)
        return executed, server_cpu(self._client)


def in_pairs(url: str, locks: Mapping[str, Any], rounds: int) -> dict[str, list[Pair]]:
    """Measure *locks* in turn, when they are warm."""
    with redis.Redis.from_url(url) as client:
        works = {name: Pairs(lock, client) for name, lock in locks.items()}
        in_turn(works, 1)
        return in_turn(works, rounds * TIMES)


def seconds_of(found: Mapping[str, list[Pair]]) -> dict[str, list[float]]:
    return {name: [pair.seconds for pair in pairs] for name, pairs in found.items()}


def _held(url: str) -> Any:
    lock = open_lock(OURS, url, "held")
    lock.acquire()
    return lock


def figures_of(pairs: list[Pair]) -> list[Figure]:
    seconds, commands, cpu = (median(each) for each in zip(*pairs, strict=True))
    micros = Figure(seconds * 1e6, "µs", 1 if seconds < 1e-5 else 0)
    return [micros, Figure(commands, places=0), Figure(cpu * 1e6, "µs", 0)]
