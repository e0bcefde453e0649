"""In what order the main process settles the messages that it parks, or hands to the pool."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_distlock import Key
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.worker.arrival import Arrival
from celery_distlock.worker.parking import Parking


class Consumer:
    """One without an event loop, that does first what came last, as Celery 5.5's."""

    hub = None
    timer = None
    hostname = "celery@test"

    def __init__(self) -> None:
        self.app = Celery("parking", set_as_current=False)
        self.qos = SimpleNamespace(
            value=1, increment_eventually=lambda: 1, decrement_eventually=lambda: 1
        )
        self._pending: list = []
        self.changed = threading.Semaphore(0)

    def call_soon(self, call) -> None:
        self._pending.append(call)
        self.changed.release()

    def perform_pending_operations(self) -> None:
        while self._pending:
            self._pending.pop()()


@pytest.fixture
def consumer():
    consumer = Consumer()
    yield consumer
    consumer.app.close()


@pytest.fixture
def parking(consumer):
    """One that takes a message as soon as its gate is open."""
    parking = Parking(consumer, SimpleNamespace(store=MemoryStore("memory://", "parking")))
    parking._parker.handle = lambda arrival: arrival.message.gate.wait(60.0)
    yield parking
    parking.close()


@pytest.fixture
def arrive(parking):
    """Has a message arrive, and returns its gate."""

    def arrive(name: str, key: str, *, gate: bool) -> threading.Event:
        message = SimpleNamespace(headers={"id": name}, properties={}, gate=threading.Event())
        if gate:
            message.gate.set()
        parking.take(
            Arrival(None, message, (Key(key),), lambda: settled.append(name), lambda: None)
        )
        return message.gate

    settled = arrive.settled = []
    return arrive


def test_none_is_settled_before_an_earlier_one_of_the_same_key(consumer, parking, arrive):
    gate = arrive("earlier", "a", gate=False)
    gate.set()
    assert consumer.changed.acquire(timeout=30.0)  # it is parked, and the loop does not know yet
    parking._thread._patience, parking._thread._no_wait_until = 60.0, 0.0

    arrive("later", "a", gate=True)
    arrive("of another key", "b", gate=True)
    assert arrive.settled == ["of another key"]

    assert consumer.changed.acquire(timeout=30.0)
    consumer.perform_pending_operations()
    assert arrive.settled == ["of another key", "earlier", "later"]


def test_those_that_were_held_are_settled_in_the_order_of_their_arrival(consumer, arrive):
    gates = [arrive(str(number), "a", gate=False) for number in range(5)]

    for gate in gates:
        gate.set()
    for _ in gates:
        assert consumer.changed.acquire(timeout=30.0)
    consumer.perform_pending_operations()

    assert arrive.settled == [str(number) for number in range(5)]
