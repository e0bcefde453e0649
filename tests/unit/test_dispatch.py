"""A releaser gives the broker a moment to take what that has woken, and then goes on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
import weakref

import pytest
from celery import Celery

from celery_distlock import install
from celery_distlock.errors import DistlockError
from celery_distlock.keys import slot_name
from celery_distlock.ops import admin as ops_admin
from celery_distlock.process import dispatcher
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ParkRequest, Sending, WokenTask
from tests.waiting import wait_until


def dispatch(send, *, patience=None, subject=""):
    return dispatcher.begin(send, subject)(patience)


@pytest.fixture(autouse=True)
def _own_dispatcher():
    dispatcher._dispatcher.reset()
    yield
    dispatcher._dispatcher.reset()


@pytest.fixture
def gate():
    """What a broker that hangs waits for."""
    gate = threading.Event()
    yield gate
    gate.set()


def test_it_is_sent_when_the_release_returns(monkeypatch):
    monkeypatch.setattr(dispatcher, "PATIENCE", 60.0)
    store, sent = MemoryStore("memory://", "test"), []
    store.publishers.known = (sent.append,)
    store.acquire(AcquireRequest("k", "a", 60.0))
    store.acquire(AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run"))

    store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

    assert [wake.run for wake in sent] == ["run"]


def test_a_tick_ends_with_an_error_if_the_broker_keeps_it_waiting(gate, monkeypatch):
    app = Celery("test", broker="memory://", set_as_current=False)
    app.conf.distlock_url = "memory://"
    install(app)
    admin = ops_admin.Admin(app)
    store, sent = admin.store, []
    store.acquire(AcquireRequest("k", "a", 60.0))
    store.acquire(AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run"))
    store.release(ReleaseRequest("k", "a"))
    store.parking.mark_returned(WokenTask(slot_name("k"), "run", b""))
    monkeypatch.setattr(ops_admin, "BROKER_PATIENCE", 0.05)

    def hang(wake):
        sent.append(wake.run)
        gate.wait(60)

    store.publishers.known = (hang,)
    with pytest.raises(DistlockError, match="the broker does not answer"):
        admin.tick()
    wait_until(lambda: sent == ["run"], what="it to be sent")
    store.close()
    app.close()


def test_what_is_woken_together_is_first_pushed_together():
    class Publisher:
        def __call__(self, wake):
            sent.append(wake.run)

        def push_together(self, wakes):
            together.append([wake.run for wake in wakes])
            return {"b"}

    store, sent, together, done = MemoryStore("memory://", "test"), [], [], []
    store.publishers.known = (Publisher(),)
    first, *others = (WokenTask("k", run, b"") for run in "abc")

    became = store.dispatch(first._replace(also=tuple(others)), on_sent=done.append, patience=60.0)

    assert (became, together, sent) == (Sending.SENT, [["a", "b", "c"]], ["a", "c"])
    assert [wake.run for wake in done] == ["a", "b", "c"]


def test_a_broker_that_hangs_is_waited_for_once_and_not_by_later_requests(gate):
    begun = time.monotonic()
    for _ in range(100):
        dispatch(lambda: gate.wait(60.0))

    assert time.monotonic() - begun < 5.0  # of the 25 that a hundred waits would take


def test_when_it_goes_on_it_is_waited_for_again(monkeypatch, gate):
    sent = []
    dispatch(lambda: gate.wait(60.0))
    dispatch(lambda: sent.append(1))
    assert not sent
    gate.set()
    wait_until(lambda: sent, what="what was behind it")
    wait_until(lambda: not dispatcher._dispatcher.value.hangs, what="that to be noted")
    monkeypatch.setattr(dispatcher, "PATIENCE", 60.0)

    dispatch(lambda: sent.append(2))

    assert sent == [1, 2]


def test_what_a_sweep_has_found_meanwhile_is_not_sent_by_us(monkeypatch, gate):
    sent = []
    dispatch(lambda: gate.wait(60.0))
    monkeypatch.setattr(dispatcher, "UNSENT", 0.0)
    dispatch(lambda: sent.append(1))
    gate.set()
    monkeypatch.setattr(dispatcher, "PATIENCE", 60.0)
    wait_until(lambda: not dispatcher._dispatcher.value.waiting, what="it to be left out")
    monkeypatch.setattr(dispatcher, "UNSENT", 60.0)

    dispatch(lambda: sent.append(2), patience=60.0)

    assert 1 not in sent


def test_one_that_goes_wrong_keeps_no_other_from_being_sent(monkeypatch, caplog):
    monkeypatch.setattr(dispatcher, "PATIENCE", 60.0)
    sent = []

    dispatch(sys.exit)
    dispatch(lambda: sent.append(1))

    assert sent == [1]
    assert "the next sweep sends it" in caplog.text


def test_what_waits_while_a_broker_hangs_is_bounded(gate):
    became = [dispatch(lambda: gate.wait(60.0)) for _ in range(dispatcher.MOST + 100)]

    assert dispatcher._dispatcher.value.waiting == dispatcher.MOST
    assert set(became[-50:]) == {dispatcher.Outcome.REFUSED}


def test_what_a_sweep_has_found_is_not_kept_while_a_broker_hangs(monkeypatch, gate):
    dispatch(lambda: gate.wait(60.0))
    message = threading.Event()
    kept = weakref.ref(message)
    dispatch(message.set)
    del message
    assert kept() is not None
    monkeypatch.setattr(dispatcher, "UNSENT", 0.0)

    dispatch(lambda: None)

    assert kept() is None


def test_calls_of_several_subjects_wait_for_a_far_server_at_the_same_time():
    meeting = threading.Barrier(dispatcher.THREADS)
    waits = [
        dispatcher.begin(lambda: meeting.wait(30.0), f"key {n}") for n in range(dispatcher.THREADS)
    ]

    assert {wait(60.0) for wait in waits} == {dispatcher.Outcome.DONE}
    assert not meeting.broken


def test_calls_of_one_subject_are_made_in_their_order(gate):
    sent = []
    dispatcher.begin(lambda: gate.wait(60.0) and sent.append("first"), "key")
    last = dispatcher.begin(lambda: sent.append("second"), "key")

    dispatch(lambda: sent.append("other"), patience=60.0, subject="other key")
    gate.set()

    assert last(60.0) is dispatcher.Outcome.DONE
    assert sent == ["other", "first", "second"]


def test_a_near_server_needs_one_thread():
    before = threading.active_count()
    for number in range(20):
        dispatch(lambda: None, patience=60.0, subject=f"key {number}")

    assert threading.active_count() <= before + 1


def test_several_woken_tasks_are_sent_at_the_same_time_once_one_is_sent():
    store, meeting = MemoryStore("memory://", "test"), threading.Barrier(dispatcher.THREADS)
    wakes = [WokenTask(f"k{n}", f"{n}:0:0:0", b"") for n in range(1 + dispatcher.THREADS)]
    store.publishers.known = (lambda wake: wake is wakes[0] or meeting.wait(30.0) >= 0,)
    sent = []

    became = list(store.dispatch_each(wakes, sent.append, 60.0))

    assert became == [Sending.SENT] * len(wakes)
    assert sent[0] is wakes[0]
    assert not meeting.broken


def test_nothing_is_made_until_something_is_sent():
    code = """
import threading
from celery_distlock.process import dispatcher
assert not dispatcher._dispatcher.is_made  # a hub put in later would block in it
put_in = threading.Lock
threading.Lock = lambda: made.append(1) or put_in()
made = []
dispatcher.begin(lambda: None, "")(None)
assert made
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60.0)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_sends_though_its_parents_broker_hangs(gate):
    dispatch(lambda: gate.wait(60.0))
    ends = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            dispatch(lambda: os.write(ends[1], b"sent"))
            time.sleep(60.0)
        finally:
            os._exit(0)
    os.close(ends[1])
    try:
        assert os.read(ends[0], 4) == b"sent"
    finally:
        os.close(ends[0])
        os.kill(pid, 9)
        os.waitpid(pid, 0)
