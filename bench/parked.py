"""What many parked tasks cost those that do not wait, and what they take in memory."""

import time
from collections.abc import Iterator
from typing import Any

from figures import Figure, Part, Row, in_turn, median, ratio

from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import ParkRequest
from celery_distlock.testing import EmbeddedServer

FEW, MANY = 10, 100_000
ENVELOPE = b"x" * 1300  # bytes; what a small task's message comes to
TURNS = 1000  # in one round


def parked(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    store = open_store(server.url, "parked")
    few = Queue(store, "few", FEW)
    before = _used_memory(server)
    many = Queue(store, "many", MANY)
    each = (_used_memory(server) - before) / MANY
    times = in_turn({"many": many, "few": few}, rounds)
    yield Part(
        "parked",
        "A long queue: handing its key over, and parking the one that had it again",
        "this / the other",
        ["this", "the other"],
        [
            Row(
                f"time with {MANY:,} parked / with {FEW}",
                Figure(ratio(times["many"], times["few"]), at_most=1.20),
                [_micros(times["many"]), _micros(times["few"])],
            ),
            Row(
                "memory of a parked task / its message",
                Figure(each / len(ENVELOPE)),
                [Figure(each, "bytes", 0), Figure(len(ENVELOPE), "bytes", 0)],
            ),
        ],
    )


class Queue:
    """A held key with parked runs; times taking and giving it up at their head."""

    def __init__(self, store: Any, key: str, size: int) -> None:
        self._store = store
        self._key = key
        self._owner = new_owner("holder")
        store.acquire(AcquireRequest(key, self._owner, 600.0))
        for number in range(size):
            self._park(f"{key}-{number}")

    def __call__(self) -> float:
        # Release hands the key to the first in the queue, which claims it and goes to the end.
        begin = time.perf_counter()
        for _ in range(TURNS):
            wake = self._store.release(ReleaseRequest(self._key, self._owner)).wake
            self._owner = new_owner("holder")
            self._store.acquire(AcquireRequest(self._key, self._owner, 600.0, run=wake.run))
            self._park(f"{wake.run}+")
        return (time.perf_counter() - begin) / TURNS

    def _park(self, run: str) -> None:
        park_request = ParkRequest(ENVELOPE, task="shop.reserve")
        self._store.acquire(
            AcquireRequest(self._key, new_owner("waiter"), 1.0, queue=park_request, run=run)
        )


def _used_memory(server: EmbeddedServer) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory"])


def _micros(seconds: list[float]) -> Figure:
    return Figure(median(seconds) * 1e6, "µs", 0)
