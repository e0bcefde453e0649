"""What the thread that parks messages finds out about one."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import pytest
from kombu.message import Message

from celery_distlock import Key
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import Want
from celery_distlock.worker.arrival import Arrival
from celery_distlock.worker.parker import Parker


@pytest.fixture
def store():
    with closing(MemoryStore("memory://", "parker")) as store:
        yield store


@pytest.fixture
def parked(store):
    """Has a message parked at "k"; returns its arrival."""
    trust = SimpleNamespace(sign=lambda name, run, sealed: sealed)
    runtime = SimpleNamespace(store=store, delivery_address="", trust=trust)
    parker = Parker(runtime, stale_after=60.0)
    task = SimpleNamespace(name="use", ignore_result=True)

    def park(identity: str, **terms) -> Arrival:
        headers = {"id": identity, "task": "use"}
        message = Message(
            body="[]", content_type="application/json", headers=headers, properties={}
        )
        arrival = Arrival(task, message, (Key("k", **terms),), lambda: None, lambda: None)
        assert parker.handle(arrival)
        return arrival

    return park


def hold(store, owner: str, want: Want) -> None:
    assert store.acquire(AcquireRequest("k", owner, 30.0, want=want)).token


def test_one_that_is_parked_while_nobody_has_the_key_came_first(parked):
    assert parked("a").came_first


def test_one_that_is_parked_behind_one_that_is_alone_did_not(store, parked):
    hold(store, "holder", Want())

    assert not parked("a").came_first


def test_one_for_which_there_may_be_room_did(store, parked):
    """A task of this worker may have left the key, and not have ended."""
    for owner in ("one", "two"):
        hold(store, owner, Want(1, 3))

    assert parked("a", capacity=3).came_first
    assert not parked("b", capacity=3).came_first
