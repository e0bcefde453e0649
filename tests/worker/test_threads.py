"""A worker whose pool is threads: many owners in one process."""

from __future__ import annotations

import pytest

from celery_distlock.engine.abort import LEAVES_MUTEXES
from celery_distlock.errors import LockLostError

WORKERS = [{"pool": "threads", "concurrency": 4}]


def test_100_tasks_neither_overlap_nor_get_lost(site, key):
    results = [site.tasks.count.delay(key) for _ in range(100)]
    for result in results:
        result.get(timeout=60)

    assert site.journal.read(f"{key}:overlaps") == []
    assert site.journal.get(key) == 100


@pytest.mark.parametrize("name", ["work_requeue", "work_wait", "work_retry"])
def test_a_task_gets_its_key_when_it_is_free(site, key, name):
    watched = f"watched-{key}"
    with site.held(watched):
        result = getattr(site.tasks, name).delay(watched)
        if name == "work_wait":
            site.wait_queued(watched)
        else:
            site.journal.wait(f"signals:{watched}", 2)

    assert result.get(timeout=30) == 0


def test_a_thread_does_not_enter_the_lock_of_another(site, key):
    first = site.tasks.work_requeue.delay(key, None, key)
    site.journal.wait(key)

    second = site.tasks.work_fail.delay(key)

    assert type(second.get(timeout=30, propagate=False)).__name__ == "LockConflictError"
    site.journal.open(key)
    assert first.get(timeout=30) == 0


def test_a_task_that_loses_its_lock_is_aborted(site, key):
    result = site.tasks.turn_long.delay(key)
    (token,) = site.journal.wait(key)

    site.forget(key)

    with pytest.raises(LockLostError) as error:
        result.get(timeout=20 * site.tasks.LEASE)
    assert result.state == "FAILURE"
    assert error.value.key == key
    assert error.value.token == token


@pytest.mark.skipif(LEAVES_MUTEXES, reason="it is raised at the end of the body, too")
def test_a_task_may_catch_the_loss_and_finish(site, key):
    result = site.tasks.catch_loss.delay(key)
    (token,) = site.journal.wait(key)

    site.forget(key)

    assert result.get(timeout=20 * site.tasks.LEASE) == {"key": key, "token": token, "held": False}


def test_only_the_thread_that_lost_its_lock_is_aborted(site, key):
    lost = site.tasks.turn_long.delay(key)
    kept = site.tasks.work_requeue.delay(f"{key}:kept", None, key)
    site.journal.wait(key)
    site.journal.wait(f"{key}:kept")

    site.forget(key)
    with pytest.raises(LockLostError):
        lost.get(timeout=20 * site.tasks.LEASE)
    site.journal.open(key)

    assert kept.get(timeout=30) == 0


def test_with_warn_a_task_that_loses_its_lock_finishes(site, key):
    result = site.tasks.ignore_loss.delay(f"watched-{key}", key)
    site.journal.wait(f"watched-{key}")

    site.forget(f"watched-{key}")
    site.workers[0].wait_log(f"lost its lock 'watched-{key}'")
    site.journal.open(key)

    assert result.get(timeout=30) is False
