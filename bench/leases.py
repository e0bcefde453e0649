"""What it takes to keep very many leases of one process alive."""

import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import redis
from figures import Figure, Part, Row, median, ratio
from team import Team

from celery_distlock import Lock
from celery_distlock.engine.watchdog import watchdog
from celery_distlock.stores import open_store
from celery_distlock.testing import EmbeddedServer

LEASES = 10_000
SAMPLE = 1000  # of them, renewed one by one
EXTEND = """\
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""


class Care(NamedTuple):
    """What one process saw."""

    passes: list[float]  # seconds
    singly: list[float]  # seconds for the same, one by one
    round_trips: int  # in each pass
    threads: int


def leases(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    with Team(1) as team:
        care: Care = team.together(1, keep, server.url, rounds)[0]
    yield Part(
        "leases",
        f"Renewing {LEASES:,} leases of one process, all due at once",
        "time / one by one",
        ["one pass", "one by one", "round trips", "threads"],
        [
            Row(
                "the watchdog",
                Figure(ratio(care.passes, care.singly)),
                [
                    Figure(median(care.passes), "s", at_most=1.0),
                    Figure(median(care.singly), "s"),
                    Figure(care.round_trips, places=0),
                    Figure(care.threads, places=0, at_most=1),
                ],
            )
        ],
    )


def keep(url: str, rounds: int) -> Care:
    """Hold the leases, and have them renewed."""
    store = open_store(url)
    locks = [Lock(f"lease {number}", lease=60.0, store=store) for number in range(LEASES)]
    for lock in locks:
        lock.acquire()
    try:
        one_by_one = OneByOne(url)
        watched = Watched(store)
        watched.renew_all()  # also a thread has to warm up
        results = [(watched.renew_all(), one_by_one()) for _ in range(rounds)]
        passes, singly = zip(*results, strict=True)
        threads = sum("watchdog" in thread.name for thread in threading.enumerate())
        return Care(list(passes), list(singly), watched.round_trips, threads)
    finally:
        for lock in locks:
            lock.release()


class Watched:
    """The watchdog, with a stopwatch."""

    def __init__(self, store: Any) -> None:
        self._watchdog: Any = watchdog(store)
        self._pass, self._watchdog._pass = self._watchdog._pass, self._timed_pass
        self._renew, store.renew = store.renew, self._counted_renewal
        self._done = threading.Event()
        self._took = 0.0
        self.round_trips = 0

    def renew_all(self) -> float:
        """Make all leases due; return how long the pass takes that renews them."""
        self._done.clear()
        self.round_trips = 0
        due = self._watchdog._due
        due.update(dict.fromkeys(due.copy(), 0.0))
        with self._watchdog._changed:
            self._watchdog._changed.notify()
        self._done.wait()
        return self._took

    def _timed_pass(self) -> None:
        begin = time.perf_counter()
        self._pass()
        if self.round_trips and not self._done.is_set():
            self._took = time.perf_counter() - begin
            self._done.set()

    def _counted_renewal(self, holds: Any, timeout: float) -> Any:
        self.round_trips += 1
        return self._renew(holds, timeout)


class OneByOne:
    """What most locks would do: a script and a round trip for each."""

    def __init__(self, url: str) -> None:
        self._client = redis.Redis.from_url(url)
        self._extend = self._client.register_script(EXTEND)
        self._client.set("extended", "token", px=600_000)

    def __call__(self) -> float:
        begin = time.perf_counter()
        for _ in range(SAMPLE):
            self._extend(keys=["extended"], args=["token", 600_000])
        return (time.perf_counter() - begin) * LEASES / SAMPLE
