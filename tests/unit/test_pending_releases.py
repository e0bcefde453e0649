from __future__ import annotations

import gc
import threading
import weakref

import pytest

from celery_distlock.engine import pending_releases
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.values import ParkRequest
from tests.handlers import hangs_of
from tests.waiting import wait_until


class Store(MemoryStore):
    """Does not answer the first releases, if so asked, and counts all of them."""

    def __init__(self, failures=0):
        super().__init__("memory://", "test")
        self.failures = failures
        self.releases = 0

    def release(self, request):
        self.releases += 1
        if self.releases <= self.failures:
            raise StoreUnavailableError("away")
        return super().release(request)


@pytest.fixture(autouse=True)
def own_errands(monkeypatch):
    pending_releases.forget()
    monkeypatch.setattr(pending_releases, "PAUSES", (0.01,) * 7)


def test_a_key_is_given_back_even_if_it_is_granted_after_the_first_release():
    class Late(Store):
        def release(self, request):
            released = super().release(request)
            if self.releases == 1:
                self.acquire(AcquireRequest("k", "a", 60.0))
            return released

    store = Late()

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    wait_until(lambda: store.releases == 2, what="the second release")
    wait_until(lambda: not store.inspect("k").token, what="the key to be free")


def test_it_is_tried_again_until_the_store_answers():
    store = Store(failures=3)
    store.acquire(AcquireRequest("k", "a", 60.0))

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    wait_until(lambda: not store.inspect("k").token, what="the key to be free")
    assert store.releases >= 4


def test_a_store_that_never_answers_is_let_go():
    store = Store(failures=100)
    pending_releases.release_later(store, ReleaseRequest("k", "a"))
    wait_until(lambda: store.releases == 8, what="every attempt")
    other = Store()

    pending_releases.release_later(other, ReleaseRequest("k", "a"))

    wait_until(lambda: other.releases == 2, what="the next errand")
    assert store.releases == 8


def test_the_next_one_is_sent():
    store = Store()
    sent = []
    store.publishers.known = (sent.append,)
    store.acquire(AcquireRequest("k", "a", 60.0))
    store.acquire(AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run"))

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    wait_until(lambda: sent, what="the next one")
    assert [wake.envelope for wake in sent] == [b"envelope"]


def test_another_holders_key_is_left_alone():
    store = Store()
    store.acquire(AcquireRequest("k", "b", 60.0))

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    wait_until(lambda: store.releases == 2, what="the errand")
    assert store.inspect("k").owner == "b"


def test_an_errand_that_comes_later_does_not_wait_for_one_that_is_retried(monkeypatch):
    store, gone = Store(), Store()
    tried = threading.Event()

    def fail(*_, **__):
        tried.set()
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(gone, "release", fail)
    monkeypatch.setattr(pending_releases, "PAUSES", (600.0,))
    made = pending_releases._PendingReleases()
    made.add(gone, ReleaseRequest("k", "a"))
    assert tried.wait(10.0)

    made.add(store, ReleaseRequest("k", "a"))

    wait_until(lambda: store.releases, timeout=10.0, what="the errand that is due")


def test_an_errand_that_is_done_keeps_nothing_alive():
    class Done:
        def __call__(self):
            pass

    on_done = Done()
    kept = weakref.ref(on_done)

    pending_releases._pending.value.add(Store(), ReleaseRequest("k", "a"), on_done)
    del on_done

    wait_until(lambda: gc.collect() >= 0 and kept() is None, what="it to be forgotten")


def test_a_store_that_hangs_holds_up_no_other():
    hangs, store = Store(), Store()
    asked, answer = threading.Event(), threading.Event()

    def hang(*_, **__):
        asked.set()
        answer.wait(60.0)
        raise StoreUnavailableError("gone")

    hangs.release = hang
    pending_releases.release_later(hangs, ReleaseRequest("k", "a"))
    assert asked.wait(30.0)

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    wait_until(lambda: store.releases == 2, what="the other store's errand")
    answer.set()


def test_a_store_that_has_nothing_to_be_done_has_no_thread(monkeypatch):
    monkeypatch.setattr(pending_releases, "IDLE", 0.01)
    made, stores = pending_releases._PendingReleases(), [Store()]
    kept = weakref.ref(stores[0])
    for number in range(1, 4):
        made.add(stores[0], ReleaseRequest("k", "a"))
        wait_until(lambda n=number: stores[0].releases == 2 * n, what="the errand")
        wait_until(lambda: not made._threads, what="the thread's end")
    stores.clear()

    wait_until(lambda: gc.collect() >= 0 and kept() is None, what="it to be forgotten")


def test_a_signal_s_handler_may_give_up_a_key_while_its_thread_does():
    store = Store()

    hangs = hangs_of(
        lambda: pending_releases.release_later(store, ReleaseRequest("k", "a")),
        lambda: pending_releases.release_later(store, ReleaseRequest("l", "b")),
        {"add"},
        before=pending_releases.forget,
    )

    assert hangs == []


def test_a_key_is_given_back_at_once_where_there_can_be_no_thread(monkeypatch):
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = Store()
    store.acquire(AcquireRequest("k", "a", 60.0))

    pending_releases.release_later(store, ReleaseRequest("k", "a"))

    assert store.inspect("k").token == 0
