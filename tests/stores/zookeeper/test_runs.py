"""Runs that end and come again, and keys that are kept for a run that comes later."""

from __future__ import annotations

import signal

import pytest

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Completion, WokenTask
from tests.stores.zookeeper.znodes import (
    BUSY,
    DONE,
    GRANTED,
    RENEWED,
    holder,
    nodes,
    renew,
    script,
    take,
    wait_for,
)
from tests.waiting import wait_until

AGAIN, UNSETTLED = Completion.YES_AND_MAY_COME_AGAIN, Completion.UNSETTLED


@pytest.fixture
def skip(monkeypatch):
    """Makes seconds pass, for this process."""
    now, offset = clock.monotonic, 0.0

    def pass_by(seconds):
        nonlocal offset
        offset += seconds

    monkeypatch.setattr(clock, "monotonic", lambda: now() + offset)
    return pass_by


def test_another_process_recognises_a_run_that_has_ended(store, open_store):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

    other = open_store()

    assert other.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status is DONE
    take(other, "k", "c", run="another", redelivered=True)
    assert (
        other.acquire(AcquireRequest("k2", "d", 30.0, run="run", redelivered=True)).status
        is GRANTED
    )


def test_a_blocked_second_delivery_leaves_the_queue_when_the_first_has_ended(store, open_store):
    other = open_store()
    take(store, "k", "a", run="run")
    inbox = wait_for(other, "k", "b", run="run", redelivered=True)
    last = wait_for(store, "k", "c")

    store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))
    inbox.wait(30.0)

    assert (
        other.acquire(
            AcquireRequest("k", "b", 30.0, queue=inbox, run="run", redelivered=True)
        ).status
        is DONE
    )
    last.wait(30.0)
    take(store, "k", "c", queue=last)


def test_an_unsettled_run_is_held_back_until_it_is_dropped(store, open_store):
    wake = WokenTask(slot_name("k"), "run", b"")
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=UNSETTLED))

    reply = open_store().acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

    assert (reply.status, reply.holder_run) == (BUSY, "run")
    assert 5.0 <= reply.remaining <= 30.0
    assert store.drop(wake).released
    assert store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status is DONE
    assert not store.drop(wake).released


def test_an_unsettled_run_that_is_dropped_without_a_mark_may_run_again(store):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=UNSETTLED))

    assert store.drop(WokenTask(slot_name("k"), "run", b""), mark=False).released

    take(store, "k", "b", run="run", redelivered=True)


def test_an_unsettled_run_that_is_never_dropped_runs_again(store, skip):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=UNSETTLED))
    skip(25.0)
    assert store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status is BUSY

    skip(10.0)

    take(store, "k", "b", run="run", redelivered=True)


def test_marks_outlive_an_hour_and_are_deleted_afterwards(store, skip):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))
    skip(3600.0)
    assert store.acquire(AcquireRequest("k", "b", 1.0, run="run", redelivered=True)).status is DONE
    client = store._contact.session.client
    hours = client.get_children(store._marks.folder)
    assert len(hours) == 1

    skip(3600.0)
    store.release(ReleaseRequest("k2", "nobody", run="later", completion=AGAIN))

    wait_until(
        lambda: not set(hours) & set(client.get_children(store._marks.folder)),
        what="the marks to be deleted",
    )
    assert (
        store.acquire(AcquireRequest("k", "b", 1.0, run="run", redelivered=True)).status is GRANTED
    )


def test_of_several_processes_one_tidies_in_a_minute(store, open_store, skip):
    take(store, "k", "a", run="run")
    store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))
    skip(100.0)
    store._marks.tidy()
    version = store._contact.session.client.get(store._marks.folder)[1].version
    skip(-100.0)  # the server's clock did not go on

    store._marks.tidy()
    open_store()._marks.tidy()

    assert store._contact.session.client.get(store._marks.folder)[1].version == version


def test_a_key_is_kept_for_its_run_ahead_of_all_waiters(store, open_store):
    other = open_store()
    token = take(store, "k", "a", run="run 1")
    inbox = wait_for(other, "k", "b")

    assert store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0))).released

    inbox.wait(30.0)
    reply = other.acquire(AcquireRequest("k", "b", 30.0, queue=inbox))
    assert (reply.status, reply.holder, reply.token) == (BUSY, "parked:run 2", token)
    assert store.inspect("k")[:3] == ("parked:run 2", token, "run 2")
    assert take(other, "k", "c", run="run 2") == token
    assert renew(other, ("k", "c", 30.0)) == [RENEWED]
    other.release(ReleaseRequest("k", "c", run="run 2"))
    inbox.wait(30.0)
    assert take(other, "k", "b", queue=inbox) > token


def test_a_kept_key_outlives_the_process_that_kept_it(url, store, prefix):
    source = """
store.acquire(AcquireRequest("k", "a", 30.0, run="run 1"))
request = ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0))
report(kept=store.release(request).released)
"""
    with script(source, url, prefix) as process:
        assert process.received()["kept"]
        process.ended()

    assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
    take(store, "k", "c", run="run 2")


def test_every_look_ends_what_a_dead_process_has_kept_too_long(url, store, prefix):
    source = """
store.acquire(AcquireRequest("k", "a", 30.0, run="run 1"))
request = ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 2.5))
report(kept=store.release(request).released)
"""
    with script(source, url, prefix) as process:
        assert process.received()["kept"]
        process.signal(signal.SIGKILL)
        process.ended()
    assert len(nodes(store, "k")) == 1

    inbox = store.inbox("k", "b")
    wait_until(
        lambda: store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is GRANTED,
        what="the end of the reservation",
    )
    assert len(nodes(store, "k")) == 1


def test_the_process_that_kept_a_key_without_need_ends_it(store):
    take(store, "k", "a", run="run 1")
    store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 2.5)))
    assert holder(store, "k") == "parked:run 2"

    wait_until(lambda: nodes(store, "k") == [], what="the end of the reservation")


def test_a_kept_run_that_is_dropped_frees_its_key(store):
    take(store, "k", "a", run="run 1")
    store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0)))

    assert store.drop(WokenTask(slot_name("k"), "run 2", b"")).released

    take(store, "k", "b")


def test_a_second_delivery_does_not_claim_what_was_kept_for_a_run_that_has_ended(store):
    take(store, "k", "a", run="run 1")
    store.release(ReleaseRequest("k", "a", run="run 1", keep_for=("run 2", 30.0)))
    store.release(ReleaseRequest("k", "nobody", run="run 2", completion=AGAIN))

    assert (
        store.acquire(AcquireRequest("k", "b", 30.0, run="run 2", redelivered=True)).status is DONE
    )

    take(store, "k", "c")


def test_a_non_holder_cannot_keep_it(store):
    take(store, "k", "a", run="run")
    inbox = wait_for(store, "k", "b")

    assert not store.release(
        ReleaseRequest("k", "b", inbox=inbox, keep_for=("other", 30.0))
    ).released
    assert not store.release(ReleaseRequest("k", "c", keep_for=("other", 30.0))).released

    assert holder(store, "k") == "a"
    assert len(nodes(store, "k")) == 1


def test_a_full_life_leaves_nothing_but_marks(store):
    take(store, "k", "a", run="run 1")
    inbox = wait_for(store, "k", "b")
    store.release(ReleaseRequest("k", "a", run="run 1", completion=AGAIN, keep_for=("run 2", 30.0)))
    take(store, "k", "c", run="run 2")
    store.release(ReleaseRequest("k", "c", run="run 2"))
    take(store, "k", "b", queue=inbox)
    store.release(ReleaseRequest("k", "b"))
    client = store._contact.session.client

    wait_until(lambda: not client.get_children(store._locks), what="the key's folder to go")

    assert store._registry._nodes == {}
    assert not store._contact.session._inboxes
