"""What many parked tasks cost, in lanes or not, in time and memory; and what a flood delays."""

import time
from collections.abc import Iterator
from typing import Any

from figures import Figure, Part, Row, in_turn, median, ratio

from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import ParkRequest, Want
from celery_distlock.testing import EmbeddedServer

FEW, MANY = 10, 100_000
ENVELOPE = b"x" * 1300  # bytes; what a small task's message comes to
TURNS = 1000  # in one round
FLOOD = 10_000  # calls of one tenant, before those of nine
SMALL = [f"small{number}" for number in range(9)] * 10


def parked(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    store = open_store(server.url, "parked")
    few = Queue(store, "few", FEW)
    before = _used_memory(server)
    many = Queue(store, "many", MANY)
    each = (_used_memory(server) - before) / MANY
    lanes = {f"{size} lanes": Queue(store, f"{size} lanes", size, size) for size in (FEW, MANY)}
    times = in_turn({"many": many, "few": few, **lanes}, rounds)

    def row(name: str, this: str, other: str, goal: float) -> Row:
        cost = Figure(ratio(times[this], times[other]), at_most=goal)
        return Row(name, cost, [_micros(times[this]), _micros(times[other])])

    yield Part(
        "parked",
        "A long queue: handing its key over, and parking the one that had it again",
        "this / the other",
        ["this", "the other"],
        [
            row(f"time with {MANY:,} parked / with {FEW}", "many", "few", 1.20),
            row(f"time with {FEW} parked, in a lane each / in none", f"{FEW} lanes", "few", 1.15),
            row(f"..., {MANY:,} / in none", f"{MANY} lanes", "many", 1.15),
            Row(
                "memory of a parked task / its message",
                Figure(each / len(ENVELOPE)),
                [Figure(each, "bytes", 0), Figure(len(ENVELOPE), "bytes", 0)],
            ),
        ],
    )
    yield _flood(store)


def _flood(store: Any) -> Part:
    lanes, arrival = (_drain(store, in_lanes) for in_lanes in (True, False))
    goals = {
        "until 99 % of the nine's have had the key": 0.02,
        "until the last one of all has had it": 1.15,
    }
    rows = [
        Row(name, Figure(this / other, at_most=goal), [Figure(this, "s"), Figure(other, "s")])
        for (name, goal), this, other in zip(goals.items(), lanes, arrival, strict=True)
    ]
    title = f"A flood: {FLOOD:,} parked tasks of one tenant, and then {len(SMALL)} of nine others"
    return Part("flood", title, "in lanes / by arrival", ["in lanes", "by arrival"], rows)


def _drain(store: Any, in_lanes: bool) -> tuple[float, float]:
    """Return after how long 99 % of the small tenants' tasks, and all tasks, have had the key."""
    queue, tenants = Queue(store, f"flood {in_lanes}"), ["big"] * FLOOD + SMALL
    for number, tenant in enumerate(tenants):
        queue.park(f"{tenant if in_lanes else ''}:{tenant}:{number}")
    begin = time.perf_counter()
    came = {queue.hand_over(): time.perf_counter() - begin for _ in tenants}
    small = [at for run, at in came.items() if "small" in run]
    return small[len(small) * 99 // 100], max(came.values())


class Queue:
    """
    A held key with parked runs, in lanes or not; times taking and giving it up at their head.

    A run's name begins with its lane.
    """

    def __init__(self, store: Any, key: str, size: int = 0, lanes: int = 0) -> None:
        self._store = store
        self._key = key
        self._owner = new_owner("holder")
        store.acquire(AcquireRequest(key, self._owner, 600.0))
        for number in range(size):
            self.park(f"{number % lanes if lanes else ''}:{number}")

    def __call__(self) -> float:
        begin = time.perf_counter()
        for _ in range(TURNS):
            self.park(f"{self.hand_over()}+")
        return (time.perf_counter() - begin) / TURNS

    def park(self, run: str) -> None:
        park_request = ParkRequest(ENVELOPE, task="shop.reserve")
        want = Want(lane=run.partition(":")[0] or None)
        self._store.acquire(
            AcquireRequest(self._key, new_owner("waiter"), 1.0, park_request, run, want=want)
        )

    def hand_over(self) -> str:
        """Release the key to the next run, which claims it; return that."""
        run = self._store.release(ReleaseRequest(self._key, self._owner)).wake.run
        self._owner = new_owner("holder")
        want = Want(lane=run.partition(":")[0] or None)
        self._store.acquire(AcquireRequest(self._key, self._owner, 600.0, run=run, want=want))
        return run


def _used_memory(server: EmbeddedServer) -> int:
    with server.client() as client:
        return int(client.info("memory")["used_memory"])


def _micros(seconds: list[float]) -> Figure:
    return Figure(median(seconds) * 1e6, "µs", 0)
