"""A fork waits for threads that are at what a child could not go on with, but not for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from contextlib import contextmanager

import pytest
from celery import Celery

from celery_distlock import stores
from celery_distlock.process import forks
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import LockHeader
from celery_distlock.runtime.messages import seal_message
from celery_distlock.runtime.publishing import publish
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.telemetry import events
from tests.waiting import wait_until

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


class Busy(threading.Thread):
    """Does *work* with what it is given, which returns when it may leave."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self.entered, self.may_leave = threading.Event(), threading.Event()
        self.inside = False
        self._work = work

    def stay(self):
        self.inside = True
        self.entered.set()
        assert self.may_leave.wait(60)
        self.inside = False

    def run(self):
        self._work(self)

    def __enter__(self):
        self.start()
        assert self.entered.wait(60)
        return self

    def __exit__(self, *_):
        self.may_leave.set()
        self.join(60)


def hold_off(busy):
    with forks.no_fork():
        busy.stay()


def send_a_task(busy):
    app = Celery("forks", broker="memory://")
    original = app.producer_or_acquire

    @contextmanager
    def producer_or_acquire():
        busy.stay()
        with original() as producer:
            yield producer

    app.producer_or_acquire = producer_or_acquire
    message = types.SimpleNamespace(
        headers={"id": "i", "task": "t"},
        body="[[], {}, {}]",
        content_type="application/json",
        content_encoding="utf-8",
        properties={},
        delivery_info={"exchange": "", "routing_key": "q"},
    )
    publish(app, seal_message(message, LockHeader.of({})))


def send_an_event(busy):
    dispatcher = types.SimpleNamespace(send=lambda *_, **__: busy.stay())
    app = types.SimpleNamespace(
        connection_for_write=lambda: None,
        events=types.SimpleNamespace(Dispatcher=lambda *_, **__: dispatcher),
    )
    events._Sender().send(events._Source(app, "worker@test"), "distlock-lost", {})


def open_a_store(busy):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stores, "_new_store", lambda *_: (busy.stay(), MemoryStore("memory://", "forks"))[1]
        )
        stores.open_store(f"memory://{id(busy)}")


def hold_off_twice(busy):
    with forks.no_fork():
        with forks.no_fork():
            pass
        busy.stay()


def hold_off_again(busy):
    with forks.no_fork():
        busy.stay()
        with forks.no_fork():
            pass


def in_a_child(check):
    """Fork, and return whether *check* is true in the child."""
    pid = os.fork()
    if not pid:
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def can_hold_off():
    with forks.no_fork():
        return True


@pytest.mark.usefixtures("lupa")
@pytest.mark.parametrize(
    "work", [hold_off, hold_off_twice, hold_off_again, send_a_task, send_an_event, open_a_store]
)
def test_a_fork_waits_until_a_thread_is_out(work, monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 60.0)
    began = time.monotonic()
    with Busy(work) as busy:

        def let_go():
            wait_until(forks._gate.locked, what="the fork to wait")
            busy.may_leave.set()

        threading.Thread(target=let_go).start()
        assert in_a_child(lambda: not busy.inside and can_hold_off())
    assert can_hold_off()
    assert time.monotonic() - began < 60.0


@pytest.mark.usefixtures("lupa")
def test_a_fork_waits_longer_for_a_thread_that_imports_a_store(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 0.01)
    with Busy(open_a_store) as busy:
        threading.Timer(0.3, busy.may_leave.set).start()
        assert in_a_child(lambda: not busy.inside)


def test_a_thread_that_stays_does_not_keep_the_process_from_forking(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 0.01)
    with Busy(hold_off) as busy:
        assert in_a_child(lambda: busy.inside and can_hold_off())
        assert can_hold_off()


def test_a_thread_that_stays_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 1.0)
    with Busy(hold_off):
        begun = time.monotonic()
        for _ in range(8):
            in_a_child(can_hold_off)
        assert time.monotonic() - begun < 6.0


def test_a_thread_that_forks_does_not_wait_for_itself(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 60.0)
    with forks.no_fork():
        assert in_a_child(can_hold_off)


def test_threads_that_fork_at_a_time_leave_no_gate_closed(monkeypatch):
    monkeypatch.setattr(forks, "PATIENCE", 0.02)
    with Busy(hold_off):
        threads = [threading.Thread(target=in_a_child, args=[can_hold_off]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    assert can_hold_off()


@pytest.mark.parametrize("known", [False, True])
def test_a_child_reads_what_another_thread_was_reading_of_the_settings(monkeypatch, known):
    runtime = Runtime.of(Celery("forks", broker="memory://"))
    read, readers = Runtime._read_layers, []

    def read_slowly(self):
        if threading.current_thread() in readers:
            readers[0].stay()
        return read(self)

    def reads():
        signal.alarm(20)  # ends a child that hangs
        runtime.plan_of(types.SimpleNamespace(name="celery.of-celery"))
        return runtime.settings.prefix == "distlock"

    if known:
        assert runtime.settings.prefix == "distlock"
    monkeypatch.setattr(Runtime, "_read_layers", read_slowly)
    busy = Busy(lambda _: (runtime._settle(), runtime.settings))
    readers.append(busy)
    with busy:
        assert in_a_child(reads)
