"""What the sweeper makes of what it finds, and says of it in the log."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from celery_distlock.engine import sweeper
from celery_distlock.engine.sweeper import Sweeper
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.process import dispatcher
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import Sending, WokenTask
from tests.waiting import wait_until


def test_a_task_s_id_cannot_forge_a_line_of_the_log(caplog):
    wake = WokenTask("k", "id\n[ERROR] forged:0:0:0", b"")
    store = MemoryStore("memory://", "test")
    store.publishers.known = (lambda wake: None,)
    store.parking.sweep = lambda interval: [wake]

    with caplog.at_level(logging.INFO, "celery_distlock.engine.sweeper"):
        Sweeper(store, 1.0)._sweep()

    said = [message for message in caplog.messages if "forged" in message]
    assert said == [r"swept up a parked task at 'k': 'id\n[ERROR] forged:0:0:0'"]


def test_what_a_log_s_handler_raises_ends_no_sweeper(monkeypatch):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log's server is unreachable")

    monkeypatch.setattr(logging.getLogger("celery_distlock.engine.sweeper"), "handlers", [Broken()])
    store, swept = MemoryStore("memory://", "test"), []

    def fail(interval: float) -> list[WokenTask]:
        swept.append(interval)
        raise StoreUnavailableError("away")

    store.parking.sweep = fail
    sweeping = Sweeper(store, 0.01)
    sweeping.start()

    wait_until(lambda: len(swept) > 2, what="later sweeps")
    sweeping.stop()


@pytest.fixture
def hanging(monkeypatch):
    """A store with three runs to find, a broker that hangs, and what lets that go on."""
    monkeypatch.setattr(dispatcher, "_dispatcher", SimpleNamespace(value=dispatcher._Dispatcher()))
    monkeypatch.setattr(sweeper, "UNSENT", 0.2)
    gate, store = threading.Event(), MemoryStore("memory://", "test")
    store.publishers.known = (lambda wake: gate.wait(60.0),)
    store.parking.sweep = lambda interval: (
        WokenTask("k", f"{n}:0:0:0", b"") for n in store.found(3)
    )
    store.given = []

    def found(number):
        for each in range(number):
            store.given.append(each)
            yield each

    store.found = found
    yield store, gate
    gate.set()
    # What was held back is sent, and logged, before the next test begins.
    assert dispatcher.begin(lambda: None, "")(60.0) is dispatcher.Outcome.DONE


def test_a_turn_ends_when_the_broker_hangs_and_the_others_are_left_to_other_workers(hanging):
    store, _ = hanging

    assert Sweeper(store, 1.0)._sweep()

    assert store.given == [0]


def test_one_that_is_sent_late_is_counted_when_it_is_sent(hanging):
    store, gate = hanging
    swept = []
    Sweeper(store, 1.0, on_swept=lambda: swept.append(1))._sweep()
    assert not swept

    gate.set()

    wait_until(lambda: swept, what="it to be counted")


def test_a_broker_that_is_slow_is_one_that_sends(monkeypatch):
    monkeypatch.setattr(dispatcher, "_dispatcher", SimpleNamespace(value=dispatcher._Dispatcher()))
    monkeypatch.setattr(dispatcher, "PATIENCE", 0.0)
    store, swept, gate = MemoryStore("memory://", "test"), [], threading.Event()
    store.publishers.known = (lambda wake: gate.wait(0.05),)
    store.parking.sweep = lambda interval: [
        WokenTask("k", "1:0:0:0", b""),
        WokenTask("k", "2:0:0:0", b""),
    ]

    assert not Sweeper(store, 1.0, on_swept=lambda: swept.append(1))._sweep()

    assert swept == [1, 1]
    assert store.dispatch(WokenTask("k", "3:0:0:0", b"")) is Sending.PENDING
