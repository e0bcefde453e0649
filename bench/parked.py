"""What many parked tasks cost those that do not wait; part of run.py."""

import statistics
import time
from collections.abc import Callable
from typing import Any

from celery_distlock import Lock
from celery_distlock.stores import open_store
from celery_distlock.stores.base import Parcel, new_owner
from celery_distlock.testing import EmbeddedServer

FEW, MANY = 10, 100_000
ENVELOPE = b"x" * 1300  # bytes; what a small task's message comes to
PAIRS = 1000
ROUNDS = 5


def beside_many(server: EmbeddedServer) -> tuple[float, float, float, float]:
    """
    Time acquire and release of a key with many parked runs, and with few.

    Returns seconds with many, with few, their ratio, and the store's bytes for each parked run.
    """
    store = open_store(server.url, "parked")
    few, many = _crowd(store, "few", FEW), None
    before = server.client().info("memory")["used_memory"]
    many = _crowd(store, "many", MANY)
    each = (server.client().info("memory")["used_memory"] - before) / MANY
    rounds = [(many(), few()) for _ in range(ROUNDS)]
    ratio = statistics.median(a / b for a, b in rounds)
    return (
        statistics.median(a for a, _ in rounds),
        statistics.median(b for _, b in rounds),
        ratio,
        each,
    )


def _crowd(store: Any, key: str, size: int) -> Callable[[], float]:
    """Park *size* runs at *key*, and return what times taking and giving it up at their head."""
    owner = new_owner("holder")
    store.acquire(key, owner, 600.0)
    for number in range(size):
        run = f"{key}-{number}"
        store.acquire(key, new_owner("waiter"), 1.0, queue=Parcel(ENVELOPE), run=run)
    state = {"owner": owner}

    def turn() -> float:
        # Release hands the key to the first in the queue, which claims it and goes to the end.
        begin = time.perf_counter()
        for _ in range(PAIRS):
            wake = store.release(key, state["owner"]).wake
            state["owner"] = new_owner("holder")
            store.acquire(key, state["owner"], 600.0, run=wake.run)
            store.acquire(key, new_owner("w"), 1.0, queue=Parcel(ENVELOPE), run=f"{wake.run}+")
        return (time.perf_counter() - begin) / PAIRS

    return turn


def others_beside(worker: Any, task: Any, hot: Any, numbers: list[int]) -> tuple[float, float]:
    """Time tasks on keys of their own alone, then beside 10,000 parked on a key that is held."""
    alone = statistics.median(worker.time(task, numbers, key="nobody") for _ in range(3))
    with Lock("one", lease=600.0, store=worker.url):
        worker.time(hot, [0.0] * 10_000, key="nobody")
        beside = statistics.median(worker.time(task, numbers, key="nobody") for _ in range(3))
        worker.forget_parked("one")
    return alone, beside
