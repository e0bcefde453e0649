"""What a grant wakes in addition is sent, as what a release wakes is."""

from __future__ import annotations

import asyncio

import pytest

from celery_distlock.engine import async_acquisition
from celery_distlock.engine.acquisition import acquire, release
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.several import acquire_all
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import Status, WokenTask

WOKEN = WokenTask("k", "woken", b"envelope")


class WakingStore(MemoryStore):
    """Every grant of it wakes a parked run; keeps what it is to send."""

    def __init__(self):
        super().__init__("memory://", "test")
        self.sent = []

    def acquire(self, request):
        return super().acquire(request)._replace(wake=WOKEN)

    def acquire_all(self, *arguments, **options):
        replies = super().acquire_all(*arguments, **options)
        return replies and [reply._replace(wake=WOKEN) for reply in replies]

    def dispatch(self, wake, **options):
        if wake is not None:
            self.sent.append(wake)
        return super().dispatch(None, **options)


@pytest.fixture
def store():
    return WakingStore()


@pytest.fixture
def new_hold(store):
    made = []

    def make(key="k"):
        made.append(Hold(store, key, Terms(), label="test", run="run"))
        return made[-1]

    yield make
    for hold in made:
        release(hold)


def test_what_a_grant_wakes_is_sent(new_hold, store):
    assert acquire(new_hold()).status is Status.GRANTED
    assert store.sent == [WOKEN]


def test_what_a_grant_to_a_coroutine_wakes_is_sent(new_hold, store):
    reply = asyncio.run(async_acquisition.acquire(new_hold(), timeout=0))
    assert reply.status is Status.GRANTED
    assert store.sent == [WOKEN]


def test_what_a_grant_of_several_keys_wakes_is_sent(new_hold, store):
    assert acquire_all([new_hold("a"), new_hold("b")])
    assert store.sent == [WOKEN, WOKEN]
