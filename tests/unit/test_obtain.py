"""What `obtain` answers when the store's answer comes late."""

from __future__ import annotations

import pytest

from celery_distlock import clock
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, HoldState, Terms
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ParkRequest, Status

LEASE = 10.0


class SlowStore(MemoryStore):
    """Its first answer comes after the lease that it grants."""

    def __init__(self, clock):
        super().__init__("memory://", "test")
        self.clock = clock
        self.slow = 1

    def acquire(self, request):
        reply = super().acquire(request)
        if self.slow:
            self.slow -= 1
            self.clock.now += LEASE + 1
        return reply


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def store(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(clock, "monotonic", fake)
    return SlowStore(fake)


@pytest.fixture
def hold(store):
    hold = Hold(store, "k", Terms(LEASE), label="test", run="run")
    yield hold
    release(hold)


def test_a_grant_that_comes_too_late_is_no_grant(hold):
    reply = acquire(hold)

    assert reply.status is Status.BUSY
    assert hold.state is HoldState.ENDED


def test_a_waiter_without_end_asks_again_after_a_grant_that_came_too_late(hold):
    reply = acquire(hold, timeout=None)

    assert reply.status is Status.GRANTED
    assert hold.held


def test_the_next_attempt_is_another_owner_so_giving_back_the_first_does_no_harm(hold):
    first = hold.owner

    acquire(hold, timeout=None)

    assert hold.owner != first
    assert hold.store.inspect("k").owner == hold.owner


def test_a_parking_request_is_parked_or_granted_and_never_refused(hold, store):
    # A caller that asks to be parked relies on being in the queue unless it holds the key.
    reply = acquire(hold, park=ParkRequest(b"envelope"))

    assert reply.status in {Status.GRANTED, Status.PARKED}
    assert hold.held == (reply.status is Status.GRANTED)
    assert hold.held or store.inspect("k").waiting == 1
