"""A task that has begun before, and has not ended, learns that when it comes again."""

from __future__ import annotations

import threading

import pytest

from celery_distlock.stores import ReleaseRequest

WORKERS = [{"concurrency": 2}]
SHARED = True


@pytest.mark.parametrize("parked", [True, False])
@pytest.mark.parametrize("how", ["reject", "die"])
def test_what_came_back_to_the_store_is_redelivered(site, key, how, parked):
    task = site.tasks.end_unless_redelivered
    if parked:
        with site.held(key):
            result = task.delay(key, how)
            site.wait_queued(key)
    else:
        result = task.delay(key, how)

    assert result.get(timeout=30) == "given up"
    assert site.journal.read(key) == [False, True]


def test_what_comes_back_through_the_broker_is_redelivered(site, key):
    with site.held(key):
        result = site.tasks.end_unless_redelivered.delay(key, "reject")
        site.wait_queued(key)
        site.forget_channel(key)

    assert result.get(timeout=30) == "given up"
    assert site.journal.read(key) == [False, True]


def test_what_the_broker_redelivers_stays_so_while_it_is_parked(site, key):
    result = site.tasks.end_unless_redelivered.delay(key, "reject", key)
    site.journal.wait(key)
    lock, taken = site.lock(key), threading.Event()

    def take():
        assert lock.acquire(timeout=30)
        taken.set()

    other = threading.Thread(target=take)
    other.start()
    site.wait_queued(key)
    site.journal.open(key)
    assert taken.wait(30)
    other.join()
    site.wait_queued(key)
    site.store.release(ReleaseRequest(key, site.look(key).owner))

    assert result.get(timeout=30) == "given up"
    assert site.journal.read(key) == [False, True]
