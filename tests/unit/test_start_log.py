"""When the next start is due, after any starts by any rates: neither too early nor too late."""

from __future__ import annotations

import copy
import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from celery_distlock.rate import Rate
from celery_distlock.stores.memory_rates import StartLog, distance_of
from celery_distlock.stores.values import Want
from tests.schedules import schedules

BEGAN = 10**15  # µs

LIMITS = st.sampled_from([1, 2, 3, 7, 20, 100])


def rates(per: float) -> st.SearchStrategy[Rate]:
    def with_bursts(limit: int) -> st.SearchStrategy[Rate]:
        return st.builds(Rate, st.just(limit), st.just(per), st.integers(1, limit))

    return LIMITS.flatmap(with_bursts)


@st.composite
def wants(draw: st.DrawFn) -> Want:
    both = draw(rates(4.0)), draw(rates(60.0))
    return Want(1, 0, both, draw(st.integers(1, min(rate.limit for rate in both))))


STEPS = st.lists(st.tuples(wants(), st.integers(0, 5_000_000)), max_size=10)


def lived(steps: list[tuple[Want, int]]) -> tuple[StartLog, int]:
    """A log of as many starts as there may be at once of each want, with pauses (µs) between."""
    log, now, number = StartLog(), BEGAN, 0
    for want, pause in steps:
        log.prune(now, lambda _: True)
        while not log.starts_in(want, now) and number % 25 != 24:
            number += 1
            log.start(f"o{number}", want, now, now)
        number += 1
        now += pause
    return log, now


def starts_in(log: StartLog, want: Want, now: int) -> float:
    log = copy.deepcopy(log)
    log.prune(now, lambda _: True)
    return log.starts_in(want, now)


@given(STEPS, wants())
@schedules(100, steps=1)
def test_one_may_start_when_it_was_said_and_not_before(steps, want):
    log, now = lived(steps)

    wait = starts_in(log, want, now)

    assert starts_in(log, want, now + math.ceil(wait) + 1) == 0.0
    if wait > 2:
        assert starts_in(log, want, now + math.floor(wait) - 1) > 0.0


@given(STEPS, wants())
@schedules(100, steps=1)
def test_a_start_is_due_at_the_distances_of_the_rate_that_is_asked_with(steps, want):
    log, now = lived(steps)
    log.prune(now, lambda _: True)
    many, due = False, 0.0
    for rate in want.rates if log.series else ():
        series = log.series[rate.microseconds]
        early = (rate.burst - 1) * distance_of(rate.microseconds, rate.limit)
        many |= series.count + want.cost > rate.limit
        reserved = sum(kept.cost for kept in log.reserved.values())
        due = max(due, series.next_by(rate.limit, now, reserved) - now - early)

    if not many and abs(due) > 1:
        assert (log.starts_in(want, now) > 0) == (due > 0)


def test_a_pause_does_not_come_back_each_time_of_the_rate():
    log, want, now = StartLog(), Want(1, 0, (Rate(100, 1.0),)), BEGAN
    begun: list[int] = []
    while now < BEGAN + 6_000_000:
        now += max(1, math.ceil(starts_in(log, want, now)))
        if len(begun) == 150:
            now += 60_000  # a worker that is late
        log.prune(now, lambda _: True)
        log.start(f"o{len(begun)}", want, now, BEGAN)
        begun.append(now)

    distances = [(after - before) / 1e3 for before, after in itertools.pairwise(begun)]
    assert max(distances[:200]) > 60.0
    assert max(distances[-200:]) < 12.0
    assert len(begun) > 0.95 * 600
