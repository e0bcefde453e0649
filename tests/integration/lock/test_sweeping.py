"""However many keys there are to sweep: one process at a time, and a rest after it."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import redis

from celery_distlock import clock
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import ParkRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = 250  # more than a batch


@pytest.fixture
def turn(prefix: str) -> str:
    """Where the sweepers' turn is."""
    return f"{prefix}:sweeper"


@pytest.fixture
def other(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    """Another process's store."""
    with closing(RedisStore(redis_url, prefix)) as store:
        yield store


@pytest.fixture
def parked(redis_store: RedisStore, client: redis.Redis, prefix: str) -> set[str]:
    """The runs that wait at keys whose holders have died."""
    for number in range(KEYS):
        redis_store.acquire(AcquireRequest(f"k{number}", "dead", 600.0))
        redis_store.acquire(
            AcquireRequest(f"k{number}", "o", 1.0, queue=ParkRequest(b"e"), run=f"run{number}")
        )
    client.delete(*(f"{prefix}:{{k{number}}}:lock" for number in range(KEYS)))
    return {f"run{number}" for number in range(KEYS)}


def test_a_turn_lasts_as_long_as_the_sweep(redis_store, other, client, turn, parked):
    left, found = [], set()
    for wake in redis_store.parking.sweep(60.0):
        found.add(wake.run)
        left.append(client.pttl(turn))
        client.pexpire(turn, 20_000)  # as if time went by
        if len(found) % 50 == 0:
            assert list(other.parking.sweep(60.0)) == []

    assert found == parked
    assert max(left[1:]) > 40_000  # it was renewed


def test_a_sweeper_that_was_suspended_for_longer_than_its_turn_leaves_the_rest_to_the_next(
    redis_store, other, client, prefix, turn, parked
):
    sweep = redis_store.parking.sweep(60.0)
    found = {next(sweep).run}
    client.delete(turn)  # it has ended

    found_by_another = {wake.run for wake in other.parking.sweep(60.0)}
    for run in found_by_another:  # it has not sent them, and they are due again
        client.zadd(f"{prefix}:{{{run.replace('run', 'k')}}}:woken", {run: 0}, xx=True)
    found |= {wake.run for wake in sweep}

    assert len(found) < KEYS
    assert found | found_by_another == parked


def test_a_sweep_that_took_long_is_followed_by_a_rest_thrice_as_long(
    redis_store, client, turn, parked, monkeypatch
):
    attempt, monotonic, passed = redis_store._requests.attempt_once, clock.monotonic, []

    def slow(calls):
        passed.append(0.4)
        return attempt(calls)

    monkeypatch.setattr(clock, "monotonic", lambda: monotonic() + sum(passed))
    monkeypatch.setattr(redis_store._requests, "attempt_once", slow)

    assert {wake.run for wake in redis_store.parking.sweep(2.0)} == parked

    assert client.pttl(turn) > 2.5 * 400 * len(passed)


def test_a_server_suspended_during_its_sweep_is_swept_soon_after(
    redis_store, client, turn, parked, monkeypatch
):
    waiting_names, monotonic, passed = redis_store._inspection.waiting_names, clock.monotonic, [0.0]

    def late():
        passed.append(10.0)
        yield from waiting_names()

    monkeypatch.setattr(clock, "monotonic", lambda: monotonic() + sum(passed))
    monkeypatch.setattr(redis_store._inspection, "waiting_names", late)

    assert {wake.run for wake in redis_store.parking.sweep(2.0)} == parked

    assert client.pttl(turn) < 10_000


def test_the_time_that_sending_takes_is_no_reason_to_rest(
    redis_store, client, turn, parked, monkeypatch
):
    monotonic, passed = clock.monotonic, []
    monkeypatch.setattr(clock, "monotonic", lambda: monotonic() + sum(passed))

    for _ in redis_store.parking.sweep(2.0):
        passed.append(1.0)  # noqa: PERF401  # one after the other: that is what the clock reads

    assert len(passed) == KEYS
    assert client.pttl(turn) < KEYS * 1000


def test_a_quick_sweep_is_followed_by_the_next_after_an_interval(redis_store, client, turn):
    assert list(redis_store.parking.sweep(100.0)) == []

    assert 60_000 < client.pttl(turn) <= 90_000
