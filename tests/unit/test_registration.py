"""Which pushed tasks a worker keeps for itself, and which it gives to others."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest
from celery.worker import state

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.runtime.messages import to_message
from celery_distlock.stores.values import PeerChannel, WokenTask
from celery_distlock.testing import FakeClock
from celery_distlock.worker import registration as registration_module
from celery_distlock.worker.in_flight import in_flight
from celery_distlock.worker.registration import Registration
from celery_distlock.worker.request import LockedRequest
from tests.unit.test_trust import envelope

WAKE = WokenTask("sku", "i:0:0:0", b"")


class Store:
    """Notes what is kept, and what is pushed to others."""

    def __init__(self):
        self.parking = self.channels = self
        self.kept = []
        self.seconds = []
        self.pushed = []
        self.peers = []
        self.registered = []
        self.is_away = False

    def keep_reserved(self, wakes, seconds):
        self.kept.append([wake.run for wake in wakes])
        self.seconds.append(seconds)

    def register_channel(self, queues, peer, seconds):
        if self.is_away:
            raise StoreUnavailableError("away")
        self.registered.append((queues, peer.free))

    def find_channels(self, queues):
        assert queues == ("celery",)
        return self.peers

    def push(self, wake, addresses):
        self.pushed.append(wake.run)
        return True


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def registration(app, store):
    """One whose thread has ended: the test does its rounds."""
    registration = Registration(
        SimpleNamespace(app=app, task_consumer=None, pool=None), store, "channel"
    )
    registration.close()
    registration._thread.join(30.0)
    store.kept.clear()
    store.seconds.clear()
    return registration


@pytest.fixture
def message(app):
    return to_message(app, json.loads(envelope()))


@pytest.fixture
def receive(app, message):
    """Have Celery make a request of the message, and forget it at the end."""
    request = functools.partial(LockedRequest, message, app=app, task=app.tasks["reserve"])
    yield request
    state.reset_state()


@pytest.fixture
def registered(monkeypatch, registration, store):
    """Return a function that reports a number of free slots and counts the reports."""

    def register(free):
        monkeypatch.setattr(registration_module, "free_slots", lambda pool: free)
        registration._report(["celery"])
        return len(store.registered)

    return register


def test_unchanged_facts_are_reported_every_other_time(registered):
    assert [registered(4) for _ in range(6)] == [1, 1, 2, 2, 3, 3]


def test_a_change_is_reported_at_once(registered, store):
    for free in (4, 3, 3, 4, 0):
        registered(free)

    assert [free for _, free in store.registered] == [4, 3, 4, 0]


def test_what_was_not_reported_is_reported_the_next_time(registered, store):
    registered(4)
    store.is_away = True
    with pytest.raises(StoreUnavailableError):
        registered(3)
    store.is_away = False

    assert registered(4) == 2


def test_what_waits_for_a_rate_limit_is_kept(store, registration, message, receive):
    bucket = [receive()]
    registration.add(WAKE, message)

    for _ in range(3):
        registration._keep()

    assert store.kept == [[WAKE.run]] * 3
    assert bucket


def test_what_waits_for_a_rate_limit_is_given_to_no_other(store, registration, message, receive):
    bucket = [receive()]
    registration.add(WAKE, message)

    store.peers = [PeerChannel("channel", 4), PeerChannel("other", 4)]
    registration._keep()
    assert store.pushed == []

    state.task_reserved(*bucket)
    registration._keep()
    assert store.pushed == [WAKE.run]


def test_what_the_broker_gave_is_kept_for_long_and_given_to_no_other(
    store, registration, message, receive
):
    request = receive()
    state.task_reserved(request)
    registration.add_fetched(WAKE, message)
    store.peers = [PeerChannel("other", 4)]

    with FakeClock().running() as clock:
        for _ in range(40):
            registration._keep()
            clock.advance(1.0)

    kept = [seconds for runs, seconds in zip(store.kept, store.seconds, strict=True) if runs]
    assert kept == [60.0, 60.0]  # each time for three times as long as until the next
    assert store.pushed == []


def test_what_the_broker_gave_is_not_given_up_at_the_end(store, registration, message, receive):
    request = receive()
    registration.add_fetched(WAKE, message)

    registration._withdraw_all()

    assert store.kept == [[]]
    assert request.waits


def test_what_has_begun_is_kept_no_longer(store, registration, message, receive):
    request = receive()
    registration.add(WAKE, message)
    request.on_accepted(1, 0.0)

    registration._keep()

    assert store.kept == [[]]


@pytest.mark.parametrize("end", ["acknowledge", "reject"])
def test_what_was_given_up_is_kept_no_longer(store, registration, message, receive, end):
    request = receive()
    registration.add(WAKE, message)
    getattr(request, end)()

    registration._keep()

    assert store.kept == [[]]


def test_what_celery_has_dropped_is_kept_no_longer(store, registration, message, receive):
    bucket = [receive()]
    registration.add(WAKE, message)
    bucket.clear()

    registration._keep()

    assert store.kept == [[]]


def test_what_waits_for_earlier_tasks_is_kept(store, registration, message):
    registration.add(WAKE, message)
    in_flight.followers.add(message.headers["id"])

    store.peers = [PeerChannel("other", 4)]
    registration._keep()
    in_flight.followers.clear()
    registration._keep()

    assert store.kept == [[WAKE.run], []]
    assert store.pushed == []
