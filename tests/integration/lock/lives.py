"""Random lives of locks in the threads of one process, and what is left of them."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from celery_distlock import Lock, clock
from celery_distlock.engine.hold import Hold
from celery_distlock.engine.watchdog import watchdog
from celery_distlock.errors import LockLostError

if TYPE_CHECKING:
    from celery_distlock.stores.redis.store import RedisStore

THREADS = 8
KEYS = 30


class Lives:
    """See the module. *seed* chooses what happens in them."""

    def __init__(self, store: RedisStore, url: str, prefix: str, seed: str) -> None:
        self.seen: Counter[str] = Counter()
        self._store = store
        self._vandal = redis.Redis.from_url(url)
        self._prefix = prefix
        self._seed = seed
        self._never = threading.Event()

    def live(self, count: int) -> None:
        """Live *count* lives."""
        numbers = itertools.count()
        threads = [
            threading.Thread(target=self._live, args=(number, count, numbers))
            for number in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def left(self) -> dict[str, Any]:
        """What this process has open and in memory, once its store is closed."""
        self._vandal.close()
        self._store.close()
        gc.collect()
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "holds": sum(type(each) is Hold for each in gc.get_objects()),
            "watched": len(watchdog(self._store)._due),
        }

    def _live(self, number: int, count: int, numbers: itertools.count[int]) -> None:
        choose = random.Random(f"{self._seed}.{count}.{number}")
        while next(numbers) < count:
            lock = Lock(
                f"key-{choose.randrange(KEYS)}",
                lease=choose.choice([0.1, 0.2, 60.0]),
                watchdog=choose.random() < 0.8,
                store=self._store,
            )
            timeout = choose.choice([0.0, 0.001, 0.02, 2.0])
            if lock.acquire(timeout=timeout):
                self._hold(lock, choose)
            else:
                self.seen["conflict" if timeout == 0 else "timeout"] += 1

    def _hold(self, lock: Lock, choose: random.Random) -> None:
        what = choose.choices(
            [self._nothing, self._reenter, self._stay, self._lose, self._extend],
            [50, 30, 4, 2, 4],
        )[0]
        try:
            what(lock, choose)
        except LockLostError:
            self.seen["loss"] += 1
        self.seen[what.__name__] += 1
        with suppress(LockLostError):
            lock.release()

    def _nothing(self, lock: Lock, choose: random.Random) -> None:
        """Give the lock up at once."""

    def _reenter(self, lock: Lock, choose: random.Random) -> None:
        for _ in range(choose.randrange(1, 4)):
            with lock:
                pass

    def _stay(self, lock: Lock, choose: random.Random) -> None:
        self._remain(lock, choose.uniform(0.01, 0.3))

    def _lose(self, lock: Lock, choose: random.Random) -> None:
        self._vandal.delete(f"{self._prefix}:{{{lock.key}}}:lock")
        self._remain(lock, 0.2)

    def _extend(self, lock: Lock, choose: random.Random) -> None:
        assert lock.lease is not None
        lock.lease.extend(choose.uniform(0.05, 1.0))

    def _remain(self, lock: Lock, seconds: float) -> None:
        until = clock.monotonic() + seconds
        while clock.monotonic() < until:
            with lock:  # raises when it is lost
                self._never.wait(0.005)
