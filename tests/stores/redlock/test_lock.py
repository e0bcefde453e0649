"""`Lock` over a quorum: as over any other store, and while nodes go."""

from __future__ import annotations

import threading
import time

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockLostError, QuorumError
from tests.stores.redlock.records import owners
from tests.waiting import wait_until


def test_a_lock_is_reentrant_and_exclusive(shared_store):
    lock = Lock("k", store=shared_store)
    with lock as lease, lock:
        assert lease.held
        assert lock.locked()
        taken = []
        thread = threading.Thread(target=lambda: taken.append(lock.acquire(timeout=0.1)))
        thread.start()
        thread.join()
    assert taken == [False]
    assert not lock.locked()


def test_a_waiter_has_the_lock_after_its_release(shared_store):
    lock, held = Lock("k", store=shared_store), threading.Event()

    def hold():
        with lock:
            held.set()
            time.sleep(0.1)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert lock.acquire(timeout=30.0)
    lock.release()
    thread.join()


@pytest.mark.faults
@pytest.mark.parametrize("broken", ["kill", "pause"])
def test_a_lock_is_renewed_over_nodes_that_go(masters, store, broken):
    lock = Lock("k", lease=3.0, store=store)
    with lock as lease:
        for node in masters.servers[:2]:
            getattr(node, broken)()
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            lease.ensure_held()
            time.sleep(0.01)
    assert not lock.locked()


@pytest.mark.faults
def test_a_lock_whose_majority_goes_is_lost_before_another_can_have_it(masters, store):
    lock = Lock("k", lease=1.0, store=store)
    lock.acquire()
    for node in masters.servers[:3]:
        node.pause()

    wait_until(lambda: not lock.lease.held, what="the lock to be lost")

    with pytest.raises(LockLostError):
        lock.release()


@pytest.mark.faults
def test_without_a_majority_a_request_does_not_hold(masters, store):
    for node in masters.servers[:3]:
        node.kill()

    with pytest.raises(QuorumError):
        Lock("k", store=store).acquire(timeout=0.2)

    for node in masters.servers[:3]:
        node.start()
    with Lock("k", store=store):
        assert owners(masters) != [""] * 5
