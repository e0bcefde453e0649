"""Taking a free lock and giving it up, and taking one again that is held already."""

import time
from collections.abc import Iterator
from typing import Any

from figures import Figure, Part, Row, in_turn, median, ratio
from locks import BARE, OURS, adapter, open_lock, present

from celery_distlock.testing import EmbeddedServer

PAIRS = 200  # acquire + release in one round
TIMES = 5  # as many rounds; short ones, since the differences are small
AGAIN = "again"


def uncontended(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    locks, absent = present()
    works = {name: Pairs(open_lock(name, server.url, "free")) for name in locks}
    works[AGAIN] = Pairs(_held(server.url))
    for warm_up in works.values():
        warm_up()
    times = in_turn(works, rounds * TIMES)
    rows = [
        Row(
            adapter(name).NAME,
            Figure(ratio(times[name], times[BARE]), at_most=1.10 if name == OURS else None),
            [_micros(times[name]), adapter(name).TERMS],
        )
        for name in locks
    ]
    again = Figure(ratio(times[AGAIN], times[BARE]))
    name = f"{adapter(OURS).NAME}, held already"
    rows.insert(1, Row(name, again, [_micros(times[AGAIN]), "no round trip"]))
    yield Part(
        "uncontended",
        "Acquire + release of a free lock",
        "time / bare lock",
        ["median", "terms"],
        rows,
        [*absent, "Only celery-distlock's lock can be taken again by who holds it."],
    )


class Pairs:
    """Times acquire + release of one lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def __call__(self) -> float:
        acquire, release = self._lock.acquire, self._lock.release
        begin = time.perf_counter()
        for _ in range(PAIRS):
            acquire()
            release()
        return (time.perf_counter() - begin) / PAIRS


def _held(url: str) -> Any:
    lock = open_lock(OURS, url, "held")
    lock.acquire()
    return lock


def _micros(seconds: list[float]) -> Figure:
    return Figure(median(seconds) * 1e6, "µs", 1 if median(seconds) < 1e-5 else 0)
