"""Observing locks costs their callers nothing, even if the observation fails."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import types

import pytest
from celery import Celery

from celery_distlock import Lock, install
from celery_distlock.errors import StoreError
from celery_distlock.process import background
from celery_distlock.stores import ReleaseRequest, open_store
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.telemetry import events, observer
from celery_distlock.telemetry.counters import samples
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _app():
    """Locks are noted where there is an app."""
    install(Celery("observed", broker="memory://"))


def counted(store):
    """What is counted there, but for the times."""
    return {each.name: each.value for each in samples(store) if not each.bucket}


def test_without_an_app_nothing_is_noted():
    code = (
        "import threading; from celery_distlock import Lock, signals\n"
        "with Lock('k', store='memory://'): pass\n"
        "assert not signals.observers\n"
        "assert not [t for t in threading.enumerate() if t.name == 'distlock-counts']"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class StruckError(Exception):
    """What is thrown at any moment, as a soft time limit is."""


@pytest.fixture
def interrupt():
    """Raise a `StruckError`, by a signal, after some seconds of the process's time."""

    def handle(*_):
        raise StruckError

    previous = signal.signal(signal.SIGVTALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, previous)


def test_no_exception_that_is_raised_where_it_is_noted_is_swallowed(interrupt):
    store = MemoryStore("memory://interrupted", "interrupted")
    lock = Lock("k", store=store)
    facts = {"key": "k", "token": 1, "holder": "h", "waited": 0.0, "waited_for": "nothing"}

    def note_until_interrupted():
        interrupt(0.001)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            observer.observe("lock_acquired", lock, store, facts)

    gc.collect()
    gc.disable()  # Python drops what is raised in a finalizer
    try:
        for _ in range(200):
            with pytest.raises(StruckError):
                note_until_interrupted()
    finally:
        gc.enable()


def test_locks_of_two_stores_are_counted_each_where_it_is(redis_url, prefix):
    one, other = (open_store(redis_url, f"{prefix}:{name}") for name in ("one", "other"))
    for store, times in ((one, 1), (other, 2)):
        for _ in range(times):
            with Lock("k", store=store):
                pass

    observer.flush()

    assert counted(one) == {"acquired": 1, "released": 1}
    assert counted(other) == {"acquired": 2, "released": 2}


def test_a_lost_lock_is_not_counted_as_released(redis_url, prefix):
    store = open_store(redis_url, prefix)
    lock = Lock("k", store=store)
    lock.acquire()
    store.release(ReleaseRequest("k", store.inspect("k").owner))
    with pytest.raises(Exception, match="no longer knew"):
        lock.release()

    observer.flush()

    assert counted(store) == {"acquired": 1, "lost": 1}


def test_what_is_being_reported_is_reported_when_flush_returns(monkeypatch):
    store = MemoryStore("memory://slow", "slow")
    reported = []

    def count(counts):
        beginning.set()
        assert goes_on.wait(60)
        reported.append(counts)

    beginning, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(store, "count", count)
    with Lock("k", store=store):
        pass
    first = threading.Thread(target=observer.flush)
    first.start()
    assert beginning.wait(60)
    second = threading.Thread(target=observer.flush)
    second.start()

    second.join(0.1)
    assert second.is_alive()
    goes_on.set()
    for thread in (first, second):
        thread.join(60)
    assert len(reported) == 1


@pytest.mark.parametrize("error", [StoreError("may not"), TypeError("may not")], ids=type)
def test_a_store_that_cannot_count_does_not_keep_others_from_it(monkeypatch, error):
    def refuse(counts):
        raise error

    refusing, other = (MemoryStore(f"memory://{name}", name) for name in ("refusing", "other"))
    monkeypatch.setattr(refusing, "count", refuse)
    for store in (refusing, other):
        with Lock("k", store=store):
            pass

    observer.flush()

    assert counted(other) == {"acquired": 1, "released": 1}


def test_a_store_that_refuses_counts_is_named_once(monkeypatch, caplog):
    store = MemoryStore("memory://refusing", "refusing")

    def refuse(counts):
        raise StoreError("this user may not")

    monkeypatch.setattr(store, "count", refuse)
    for _ in range(3):
        with Lock("k", store=store):
            pass
        observer.flush()

    assert caplog.text.count("this user may not") == 1


class Broker:
    """An app with a broker that accepts nothing until a test allows it."""

    def __init__(self) -> None:
        self.there = False
        self.sent: list[str] = []
        self.tries = 0
        self.events = types.SimpleNamespace(Dispatcher=lambda *_, **__: self)

    def connection_for_write(self):
        return self

    def release(self):
        pass

    def send(self, kind, **fields):
        self.tries += 1
        if not self.there:
            raise OSError("no broker")
        self.sent.append(kind)


def test_events_are_left_out_for_a_while_when_the_broker_is_unreachable(monkeypatch):
    broker = Broker()
    monkeypatch.setattr(events, "_sender", types.SimpleNamespace(value=events._Sender()))
    monkeypatch.setattr(events, "source", None)
    events.set_source(broker, "worker@test")

    for _ in range(100):
        events.send("lock_acquired", "", {"key": "k"})
    wait_until(lambda: broker.tries, what="the first attempt")
    broker.there = True
    done = threading.Event()
    events._notifier.submit(done.set)
    assert done.wait(60)
    assert (broker.tries, broker.sent) == (1, [])

    monkeypatch.setattr(events._sender.value, "_quiet_until", 0.0)
    events.send("lock_released", "", {"key": "k"})
    wait_until(lambda: broker.sent == ["distlock-released"], what="the event after that")


def test_one_that_cannot_be_reported_does_not_keep_the_next_from_being_reported(caplog):
    reported = threading.Event()
    mine = background.BackgroundNotifier("test-notifier")

    mine.submit(lambda: {}["nothing"])
    mine.submit(reported.set)

    assert reported.wait(60)
    mine.finish(60)
