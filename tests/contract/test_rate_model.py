"""
However long messages travel, no time of a rate's length has more starts than its limit.

A world of its own clock: tasks come, wait, are woken, and come for their key after a while, or
never; the limit changes, and the clock is set. Counted are those that have claimed their key.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from celery_distlock import clock
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest, ParkRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import Completion, Status, Want
from tests import servers
from tests.rewriting import RewrittenServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

PER = 60.0
KEY = "k"


@dataclass
class World:
    """One key, its tasks, and when each of them has started."""

    store: QueueStore
    pass_time: Callable[[float], None]
    chance: random.Random
    limit: int
    burst: int
    capacity: int
    mishaps: float = 0.01
    passed: float = 0.0  # in addition to the time that the test takes
    began: float = field(default_factory=time.monotonic)
    came: int = 0
    on_their_way: list[tuple[float, str]] = field(default_factory=list)
    running: list[tuple[float, str, str]] = field(default_factory=list)
    asked: dict[str, int] = field(default_factory=dict)  # by which limit a run waits
    starts: list[tuple[float, int]] = field(default_factory=list)  # when, and by which limit

    @property
    def want(self) -> Want:
        return Want(1, self.capacity, (Rate(self.limit, PER, min(self.burst, self.limit)),))

    @property
    def now(self) -> float:
        return self.passed + time.monotonic() - self.began

    def wait(self, seconds: float) -> None:
        self.passed += seconds
        self.pass_time(seconds)

    def comes(self, run: str, *, again: bool) -> None:
        self.came += 1
        owner, request = f"o{self.came}", ParkRequest(run.encode())
        reply = self.store.acquire(
            AcquireRequest(KEY, owner, 3000.0, request, run, redelivered=again, want=self.want)
        )
        self._take(reply.wake)
        if reply.status is Status.GRANTED:
            self.starts.append((self.now, max(self.limit, self.asked.pop(run, 0))))
            self.running.append((self.now + self.chance.expovariate(1 / 5), owner, run))
        else:
            self.asked[run] = self.limit

    def _take(self, wake: object) -> None:
        for each in [wake, *wake.also] if wake is not None else []:
            self.store.parking.mark_published(each)
            travel = 9.0 if self.chance.random() < self.mishaps else self.chance.choice([0, 1, 4])
            self.on_their_way.append((self.now + travel, each.run))

    def step(self) -> None:
        for due, run in [each for each in self.on_their_way if each[0] <= self.now]:
            self.on_their_way.remove((due, run))
            if self.chance.random() >= self.mishaps:  # else it is lost
                self.comes(run, again=False)
        for due, owner, run in [each for each in self.running if each[0] <= self.now]:
            self.running.remove((due, owner, run))
            end = ReleaseRequest(KEY, owner, run, Completion.YES, started=True)
            self._take(self.store.release(end).wake)
        for wake in list(self.store.parking.wake_next(KEY)):
            self._take(wake)
        if self.chance.random() < 0.6:
            self.comes(f"run-{self.came}", again=False)
        if self.chance.random() < self.mishaps:
            self.limit = self.chance.choice([3, 6, 12])
        if self.chance.random() < self.mishaps / 2:
            self.pass_time(-25.0)  # the clock is set back
        self.wait(self.chance.choice([0.0, 0.3, 1.0, 3.0]))

    def excess(self) -> int:
        """By how many the worst window exceeds the limits that were in force in it."""
        worst = -self.limit
        for first, _ in self.starts:
            window = [limit for at, limit in self.starts if first <= at < first + PER - 0.1]
            worst = max(worst, len(window) - max(window, default=0))
        return worst


@pytest.fixture(params=["memory", "redis"])
def make_world(request, redis_url, prefix, monkeypatch):
    opened = []

    def make(seed: int) -> World:
        chance = random.Random(seed)
        if request.param == "redis":
            name = f"{prefix}-{seed}"
            store: QueueStore = RedisStore(redis_url, name)

            def pass_time(seconds: float) -> None:
                servers.bring_nearer(redis_url, name, seconds)

        else:
            store, offset, now = MemoryStore("memory://", prefix), [0.0], clock_now
            monkeypatch.setattr(clock, "monotonic", lambda: now() + offset[0])

            def pass_time(seconds: float) -> None:
                offset[0] += seconds

        opened.append(store)
        limit, burst = chance.choice([3, 6, 12]), chance.choice([1, 3, 12])
        return World(store, pass_time, chance, limit, burst, chance.choice([0, 0, 1, 4]))

    yield make
    for store in opened:
        store.close()


clock_now = clock.monotonic


def lived(make_world, seed: int, steps: int) -> World:
    world = make_world(seed)
    for _ in range(steps):
        world.step()
    return world


@pytest.mark.parametrize("seed", range(12))
def test_no_window_has_more_starts_than_the_limit(make_world, seed):
    world = lived(make_world, seed, 300)

    assert len(world.starts) >= 10
    assert world.excess() <= 0


def test_it_is_found_if_starts_count_when_the_key_is_handed_over_alone(monkeypatch, prefix):
    reserved = "F.integer(log.reserved)"
    keeps = f"redis.pcall('HSET', RATE, 'r:' .. owner, terms, 'reserved', {reserved})\n"
    counts_then = """
        for _, series in pairs(log.series) do
            series.parts[#series.parts + 1] = { now, F.rates_of(terms) }
            series.count = series.count + F.rates_of(terms)
            F.write_series(series)
        end
    """
    changes = (keeps, keeps + counts_then), ("F.count_start(another, terms)", "")
    excess = []
    for seed in range(30):
        offset = [0.0]
        monkeypatch.setattr(clock, "monotonic", lambda offset=offset: clock_now() + offset[0])
        with closing(MemoryStore("memory://", prefix)) as store:
            store._servers.server = server = RewrittenServer(*changes)

            def pass_time(seconds: float, offset: list[float] = offset) -> None:
                offset[0] += seconds

            world = World(store, pass_time, random.Random(seed), 6, 6, 0, 0.0)
            for _ in range(300):
                world.step()
            excess.append(world.excess())
            server.check()

    assert max(excess) > 0
