"""
A process whose threads take, keep and give up keys at random, and write down what they believe.

Run as ``python -m tests.faults.history.actor URL PREFIX FILE SEED [BREAKAGE]`` until a line comes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from celery_distlock import Key, Lock, clock
from celery_distlock.engine import hold as hold_module
from celery_distlock.engine.acquisition import release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.several import acquire_all
from celery_distlock.errors import LockError, StoreError
from celery_distlock.stores import Ability, AcquireRequest, ReleaseRequest, Want, open_store
from celery_distlock.stores.redis.store import RedisStore

THREADS = 6
KEYS = 16
LEASES = (0.12, 0.4)  # seconds
SEVERAL = 0.3  # of all lives
SHARED = [
    {"shared": True},
    {"capacity": 2},
    {"capacity": 3},
    {"capacity": 3, "weight": 2},
    {"capacity": 3, "weight": 9},
]


class Actor:
    """See the module."""

    def __init__(self, url: str, prefix: str, file: str, seed: str) -> None:
        self._store = open_store(url, prefix)
        self._file = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._seed = seed
        self._ended = threading.Event()

    def run(self) -> None:
        threading.excepthook = end_the_process
        threads = [threading.Thread(target=self._live, args=(n,)) for n in range(THREADS)]
        for thread in threads:
            thread.start()
        sys.stdin.readline()
        self._ended.set()
        for thread in threads:
            thread.join()

    def _live(self, number: int) -> None:
        choose = random.Random(f"{self._seed}.{number}")
        while not self._ended.is_set():
            with suppress(StoreError):
                self._one_life(choose)

    def _one_life(self, choose: random.Random) -> None:
        if choose.random() < SEVERAL:
            self._one_life_with_several(choose)
        else:
            self._one_life_with_one(choose)

    def _one_life_with_several(self, choose: random.Random) -> None:
        """Take two or three keys in one request, as a task does that finds them free."""
        terms = Terms(choose.uniform(*LEASES), watchdog=choose.random() < 0.7)
        names = [f"key-{number}" for number in choose.sample(range(KEYS), choose.choice([2, 3]))]
        keys = [self._key(name, choose) for name in names]
        holds = [Hold(self._store, key, terms, label="several") for key in keys]
        if not acquire_all(holds):
            return
        for hold in holds:
            self._begin(hold)
        until = clock.monotonic() + choose.uniform(0.0, 0.5)
        while clock.monotonic() < until and all(hold.held for hold in holds):
            time.sleep(0.005)
        for hold in holds:
            self._end(hold)
        for hold in reversed(holds):
            release(hold)

    def _one_life_with_one(self, choose: random.Random) -> None:
        lock = Lock(
            self._key(f"key-{choose.randrange(KEYS)}", choose),
            lease=choose.uniform(*LEASES),
            watchdog=choose.random() < 0.7,
            store=self._store,
        )
        if not lock.acquire(timeout=choose.choice([0.0, 0.1, 0.5, 2.0])):
            return
        assert lock.lease is not None
        (hold,) = lock.lease._holds
        self._begin(hold)
        if choose.random() < 0.2:
            with suppress(LockError, StoreError):
                lock.lease.extend(choose.uniform(*LEASES))
        with suppress(LockError):
            self._work(lock, choose)
        self._end(hold)
        with suppress(LockError):
            lock.release()

    def _key(self, name: str, choose: random.Random) -> Key:
        """Return the key: alone, or as one of several where the store can do that."""
        abilities = self._store.abilities
        if Ability.SEVERAL not in abilities or choose.random() < 0.5:
            return Key(name)
        terms = choose.choice(SHARED)
        if "weight" in terms and Ability.QUEUE not in abilities:
            return Key(name, capacity=3)
        return Key(name, **terms)  # type: ignore[arg-type]

    def _work(self, lock: Lock, choose: random.Random) -> None:
        until = clock.monotonic() + choose.choice([0.0, 0.01, 0.1, choose.uniform(0, 1.2)])
        while clock.monotonic() < until:
            lock.lease.ensure_held()  # type: ignore[union-attr]
            if choose.random() < 0.1:
                with lock:
                    time.sleep(0.001)
            time.sleep(0.005)

    def _begin(self, hold: Hold) -> None:
        facts = {"key": hold.key, "begin": hold.held_since, "token": hold.token, "pid": os.getpid()}
        units, capacity = hold.want.units, hold.want.capacity
        until = hold.valid_until
        self._write(owner=hold.owner, units=units, capacity=capacity, until=until, **facts)
        hold.on_event = lambda *_, **__: self._renewed(hold)
        self._renewed(hold)  # it may have been, before that

    def _renewed(self, hold: Hold) -> None:
        self._write(owner=hold.owner, until=hold.valid_until)

    def _end(self, hold: Hold) -> None:
        # What was lost early, because the store said so, was believed until then at most.
        self._write(owner=hold.owner, end=min(clock.monotonic(), hold.valid_until))

    def _write(self, **facts: Any) -> None:
        os.write(self._file, json.dumps(facts).encode() + b"\n")


def end_the_process(failed: threading.ExceptHookArgs) -> None:
    """Have an actor that lost a thread missed."""
    threading.__excepthook__(failed)
    os._exit(1)


# Locks that are wrong, to see that it is found


def release_without_looking() -> None:
    """A release takes the key from any holder."""
    right = RedisStore.release

    def wrong(self: RedisStore, request: ReleaseRequest) -> Any:
        holder = self.inspect(request.key).owner
        return right(self, request._replace(owner=holder or request.owner))

    RedisStore.release = wrong  # type: ignore[method-assign]


def believe_from_the_answer() -> None:
    """A lease counts from when its answer came."""
    taken, renewed = Hold.take, Hold.renewed
    hold_module.believed = lambda seconds: seconds

    def take(self: Hold, reply: Any) -> bool:
        return taken(self, reply._replace(asked_at=clock.monotonic()))

    def renew(self: Hold, outcome: Any, asked_at: float, seconds: float) -> None:
        renewed(self, outcome, clock.monotonic(), seconds)

    Hold.take, Hold.renewed = take, renewed  # type: ignore[method-assign]


def take_all_from_any_holder() -> None:
    """Several keys are granted although others may hold some of them."""
    right = RedisStore.acquire_all

    def wrong(
        self: RedisStore, names: list[str], owners: list[str], *rest: Any, **more: Any
    ) -> Any:
        for name in names:
            holder = self.inspect(name).owner
            if holder:
                self.release(ReleaseRequest(name, holder))
        return right(self, names, owners, *rest, **more)

    RedisStore.acquire_all = wrong  # type: ignore[method-assign]


def let_one_too_many_in() -> None:
    """Of a key with a capacity, one more is granted than there are."""
    right = RedisStore.acquire

    def wrong(self: RedisStore, request: AcquireRequest) -> Any:
        units, capacity = request.want.units, request.want.capacity
        more = capacity + 1 if capacity > 1 else capacity
        return right(self, request._replace(want=Want(units, more)))

    RedisStore.acquire = wrong  # type: ignore[method-assign]


def admit_readers_with_a_writer() -> None:
    """An exclusive holder is taken for a sharing one."""
    right = RedisStore.acquire

    def wrong(self: RedisStore, request: AcquireRequest) -> Any:
        return right(self, request._replace(want=Want(1, 0)))

    RedisStore.acquire = wrong  # type: ignore[method-assign]


BREAKAGES = {
    "lets one too many in": let_one_too_many_in,
    "admits readers with a writer": admit_readers_with_a_writer,
    "takes all from any holder": take_all_from_any_holder,
    "releases without looking": release_without_looking,
    "believes from the answer": believe_from_the_answer,
}

if __name__ == "__main__":
    for name in sys.argv[5:]:
        BREAKAGES[name]()
    Actor(*sys.argv[1:5]).run()
