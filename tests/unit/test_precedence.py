"""Which task a prefork pool begins next, by kombu's own semaphore."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kombu.asynchronous.semaphore import LaxBoundedSemaphore

from celery_distlock.worker.delivery import Precedence


@pytest.fixture
def semaphore():
    return LaxBoundedSemaphore(1)


@pytest.fixture
def begun():
    return []


@pytest.fixture
def first(semaphore):
    return Precedence(SimpleNamespace(semaphore=semaphore))


def finish_all(semaphore, begun):
    count = -1
    while len(begun) > count:
        count = len(begun)
        semaphore.release()


def test_a_woken_task_begins_before_what_waits_and_after_others_that_were_woken(
    semaphore, begun, first
):
    for name in ("runs", "a", "b"):
        semaphore.acquire(begun.append, name)
    for name in ("woken 1", "woken 2"):
        with first():
            semaphore.acquire(begun.append, name)
    semaphore.acquire(begun.append, "c")
    semaphore.release()
    with first():
        semaphore.acquire(begun.append, "woken 3")

    finish_all(semaphore, begun)

    assert begun == ["runs", "woken 1", "woken 2", "woken 3", "a", "b", "c"]


def test_what_begins_at_once_changes_no_order(semaphore, begun, first):
    with first():
        semaphore.acquire(begun.append, "woken")
    for name in "ab":
        semaphore.acquire(begun.append, name)
    with first():
        pass  # it was revoked, say

    finish_all(semaphore, begun)

    assert begun == ["woken", "a", "b"]


@pytest.mark.parametrize("controller", [None, SimpleNamespace(), SimpleNamespace(semaphore=None)])
def test_where_there_is_no_such_semaphore_nothing_is_changed(controller):
    with Precedence(controller)():
        pass
