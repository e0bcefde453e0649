"""When the next start is due, after any starts by any rates: neither too early nor too late."""

from __future__ import annotations

import copy
import itertools
from contextlib import closing, contextmanager

from hypothesis import given
from hypothesis import strategies as st

from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import Status, Want
from celery_distlock.testing import FakeClock
from tests.schedules import schedules

LIMITS = st.sampled_from([1, 2, 3, 7, 20, 100])
LEASE = 3600.0
EXACT = 0.002  # seconds: the store counts milliseconds


def rates(per: float) -> st.SearchStrategy[Rate]:
    def with_bursts(limit: int) -> st.SearchStrategy[Rate]:
        return st.builds(Rate, st.just(limit), st.just(per), st.integers(1, limit))

    return LIMITS.flatmap(with_bursts)


@st.composite
def wants(draw: st.DrawFn) -> Want:
    both = draw(rates(4.0)), draw(rates(60.0))
    return Want(1, 0, both, draw(st.integers(1, min(rate.limit for rate in both))))


STEPS = st.lists(st.tuples(wants(), st.floats(0, 5)), max_size=10)


class World:
    def __init__(self, store: MemoryStore, clock: FakeClock) -> None:
        self.clock = clock
        self._store = store
        self._owners = itertools.count()

    def start(self, want: Want) -> float:
        """Start; return the seconds until it may be, which is 0 if it has."""
        request = AcquireRequest("k", f"o{next(self._owners)}", LEASE, want=want)
        reply = self._store.acquire(request)
        return 0.0 if reply.status is Status.GRANTED else reply.due

    def starts_in(self, want: Want) -> float:
        server = self._store._servers.server
        before = copy.deepcopy(server.keys)
        try:
            return self.start(want)
        finally:
            server.keys = before


@contextmanager
def world():
    with FakeClock().running() as clock, closing(MemoryStore("memory://", "t")) as store:
        yield World(store, clock)


@given(STEPS, wants())
@schedules(100, steps=1)
def test_one_may_start_when_it_was_said_and_not_before(steps, want):
    with world() as here:
        for each, pause in steps:
            for _ in range(25):
                if here.start(each):
                    break
            here.clock.advance(pause)

        wait = here.starts_in(want)

        if wait > 2 * EXACT:
            here.clock.advance(wait - EXACT)
            assert here.starts_in(want) > 0.0
            wait = EXACT
        here.clock.advance(wait)
        assert here.starts_in(want) == 0.0


def test_a_pause_does_not_come_back_each_time_of_the_rate():
    want, begun = Want(1, 0, (Rate(100, 1.0),)), []
    with world() as here:
        end = here.clock.monotonic() + 6.0
        while here.clock.monotonic() < end:
            while wait := here.start(want):
                here.clock.advance(wait)
            begun.append(here.clock.monotonic())
            if len(begun) == 150:
                here.clock.advance(0.06)  # a worker that is late

    distances = [after - before for before, after in itertools.pairwise(begun)]
    assert max(distances[:200]) > 0.059
    assert max(distances[-200:]) < 0.012
    assert len(begun) > 0.9 * 600
