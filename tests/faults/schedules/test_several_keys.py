"""
All runs that wait at several keys get on, in any order, if any process dies between two steps.

``DISTLOCK_TEST_SCHEDULES`` says how many random schedules are tried.
"""

from __future__ import annotations

import collections
import logging
import os
import random
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.queue_store import ready, reserve_or_queue
from celery_distlock.stores.redis import request_runner
from celery_distlock.stores.values import Completion, ParkRequest, Route, Status, WokenTask
from tests.faults.schedules import store as unlucky
from tests.faults.schedules.store import Time, UnluckyStore

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = ("a", "b", "c", "d")
SCHEDULES = int(os.environ.get("DISTLOCK_TEST_SCHEDULES", "40"))
LEASE = 30.0

pytestmark = pytest.mark.timeout(0)


class Run:
    def __init__(self, name: str, keys: list[str], stamp: int) -> None:
        self.name, self.keys, self.stamp = name, keys, stamp
        self.route = Route(tuple(keys))
        self.ended = self.sent = 0


class World:
    """Runs, and what is under way between them and the store: any of it may come next, or never."""

    def __init__(self, store: Any, rng: random.Random, *, by_steps: bool, calm: bool) -> None:
        self.store, self.rng, self.calm = store, rng, calm
        if by_steps:
            store.parking.try_all = lambda request, counts: None
        self.runs: dict[str, Run] = {}
        self.steps: list[Iterator[None]] = []
        self.holders: dict[str, str] = {}
        self.tokens = dict.fromkeys(KEYS, 0)

    def go(self, steps: Iterator[None]) -> None:
        self.steps.append(steps)

    def arrive(self) -> None:
        keys = sorted(self.rng.sample(KEYS, self.rng.choice([1, 2, 2, 3])))
        run = Run(f"r{len(self.runs)}:0:0:0", keys, len(self.runs))
        self.runs[run.name] = run
        self.go(self.execute(run, {}, repeated=False))

    def execute(self, run: Run, taken: dict[str, str], *, repeated: bool) -> Iterator[None]:
        taken |= self.take_at_once(run, repeated)
        yield
        for key in run.keys if not taken else []:
            owner = f"{run.name}/{self.rng.random()}"
            reply = self.store.acquire(
                AcquireRequest(key, owner, LEASE, run=run.name, redelivered=repeated)
            )
            self.wake(reply.wake)
            yield
            if reply.status is Status.GRANTED:
                assert reply.token > self.tokens[key]
                self.tokens[key] = reply.token
                taken[key] = owner
            elif reply.status is Status.DONE or reply.holder_run == run.name:
                yield from self.give_up(run, taken, Completion.NO)
                return
            else:
                yield from self.reserve_or_queue(run, taken)
                return
        assert not run.ended, f"{run.name} runs again"
        for key in run.keys:
            assert key not in self.holders, f"{self.holders[key]} and {run.name} have {key}"
            self.holders[key] = run.name
        yield
        for key in run.keys:
            del self.holders[key]
        run.ended += 1
        yield from self.give_up(run, taken, Completion.YES_AND_MAY_COME_AGAIN)

    def take_at_once(self, run: Run, repeated: bool) -> dict[str, str]:
        owners = {key: f"{run.name}/{self.rng.random()}" for key in run.keys}
        replies = self.rng.random() < 0.5 and self.store.acquire_all(
            run.keys, list(owners.values()), LEASE, run=run.name, redelivered=repeated
        )
        for key, reply in zip(run.keys, replies or [], strict=False):
            assert reply.token > self.tokens[key]
            self.tokens[key] = reply.token
        return owners if replies else {}

    def give_up(self, run: Run, taken: dict[str, str], ended: Completion) -> Iterator[None]:
        for key, owner in reversed(taken.items()):
            self.wake(
                self.store.release(ReleaseRequest(key, owner, run=run.name, completion=ended)).wake
            )
            yield

    def reserve_or_queue(self, run: Run, taken: dict[str, str]) -> Iterator[None]:
        owners = [taken.pop(key, "") for key in run.keys]
        park_request = ParkRequest(run.name.encode())
        request = StandRequest(run.name, run.route, 0, park_request, owners, comes=True)
        reply = reserve_or_queue(self.store, request)
        self.wake(reply.wake)
        yield
        if reply.status is Status.RESERVED:
            yield from self.execute(run, {}, repeated=False)

    def wake(self, wake: WokenTask | None) -> None:
        if wake is not None and (self.calm or self.rng.random() > 0.1):  # else its waker dies
            for each in (wake._replace(also=()), *wake.also):
                self.go(self.send(each))

    def send(self, wake: WokenTask) -> Iterator[None]:
        yield
        with_its_end = ready(self.store, wake)
        while True:
            self.store.losses = "" if self.calm else self.rng.choice(["", "", "", "x", "-x"])
            try:
                each = next(with_its_end)
            except (StopIteration, StoreUnavailableError):
                return
            finally:
                self.store.losses = ""
            assert each.route is None
            run = self.runs[each.run]
            assert (each.name, each.envelope) == (run.keys[0], run.name.encode())
            run.sent += 1
            self.go(self.execute(run, {}, repeated=True))
            yield

    def step(self) -> None:
        steps = self.rng.choice(self.steps)
        if next(steps, steps) is steps:
            self.steps.remove(steps)

    def finish(self, pass_time: Any) -> int:
        """Let all come to its end; how many seconds had to pass."""
        seconds = 0
        while True:
            while self.steps:
                self.step()
            if all(run.ended for run in self.runs.values()):
                return seconds
            assert not self.calm, "nothing went wrong, but a sweep is needed"
            assert seconds < 300, [run.name for run in self.runs.values() if not run.ended]
            pass_time(3.0)
            seconds += 3
            for wake in self.store.parking.sweep(0.01):
                self.go(self.send(wake))


@pytest.fixture(params=["redis", "memory"])
def opened(
    request: pytest.FixtureRequest,
    redis_url: str,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Iterator[tuple[Any, Any]]:
    """A store, and how time passes for it."""
    caplog.set_level(logging.CRITICAL, logger="celery_distlock")
    monkeypatch.setattr(request_runner, "PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(unlucky, "KEYS", KEYS)
    time = Time()
    monkeypatch.setattr(clock, "monotonic", time)
    if request.param == "redis":
        with closing(UnluckyStore(redis_url, prefix, time)) as store:
            yield store, store.pass_time
    else:

        def pass_time(seconds: float) -> None:
            time.passed += seconds

        yield MemoryStore(f"memory://{prefix}", prefix), pass_time


@pytest.mark.parametrize("calm", [True, False], ids=["calm", "with deaths"])
@pytest.mark.parametrize("by_steps", [True, False], ids=["step by step", "at once"])
def test_all_that_wait_at_several_keys_get_on(opened, by_steps, calm):
    store, pass_time = opened
    waited = collections.Counter()
    for seed in range(SCHEDULES):
        world = World(store, random.Random(seed), by_steps=by_steps, calm=calm)
        for _ in range(12):
            world.arrive()
            for _ in range(world.rng.randrange(8)):
                if world.steps:
                    world.step()
        waited[world.finish(pass_time)] += 1
        if isinstance(store, UnluckyStore):
            store.clear()
        else:
            store.start_over(store.identity)
    print(dict(waited))  # noqa: T201
