"""In what order messages have come, by a clock that is the lock store's."""

from __future__ import annotations

import pytest

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.testing import FakeClock
from celery_distlock.worker.arrival import EXACT_FOR, ArrivalTimes


@pytest.fixture
def store(monkeypatch):
    store = MemoryStore("memory://", "test")
    store.ahead = 0
    server_time = store.time
    monkeypatch.setattr(store, "time", lambda patience: server_time(patience) + store.ahead)
    return store


def test_without_an_answer_of_the_store_an_arrival_has_no_time(store, monkeypatch):
    def refuse(patience):
        raise StoreUnavailableError("away")

    monkeypatch.setattr(store, "time", refuse)
    arrivals = ArrivalTimes(store)

    arrivals.read_clock(1.0)

    assert [arrivals.stamp(), arrivals.stamp()] == [0, 0]


def test_stamps_are_the_stores_time_and_rise(store):
    store.ahead = 10**15
    arrivals = ArrivalTimes(store)
    arrivals.read_clock(1.0)

    before = store.time(1.0)
    stamps = [arrivals.stamp() for _ in range(1000)]

    assert stamps == sorted(set(stamps))
    assert before - 10**6 < stamps[0] < stamps[-1] < store.time(1.0) + 10**6


def test_stamps_rise_when_the_stores_clock_is_set_back(store):
    arrivals = ArrivalTimes(store)
    arrivals.read_clock(1.0)
    first = arrivals.stamp()

    store.ahead = -(10**9)
    arrivals.read_clock(1.0)

    assert arrivals.stamp() == first + 1


def test_a_clock_is_read_again_after_a_while_and_kept_through_an_outage(store, monkeypatch):
    arrivals = ArrivalTimes(store)
    assert arrivals.inexact
    with FakeClock().running() as clock:
        arrivals.read_clock(1.0)
        assert not arrivals.inexact
        clock.advance(EXACT_FOR + 1)
        assert arrivals.inexact

    def refuse(patience):
        raise StoreUnavailableError("away")

    monkeypatch.setattr(store, "time", refuse)
    arrivals.read_clock(1.0)
    assert arrivals.stamp()
    assert not arrivals.inexact  # the next attempt is as far away
