"""`Lock` in trio's tasks: they share a thread, and are not one owner for it."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockConflictError, LockError, LockNotOwnedError


class Task:
    """One of trio's."""


@pytest.fixture
def new_lock(redis_store):
    return lambda **options: Lock("k", store=redis_store, **options)


@pytest.fixture
def run_as(monkeypatch):
    """Have trio say that this task of its runs, of a loop in this thread; None: no loop does."""
    running = [None]

    def current_task():
        if running[0] is None:
            raise RuntimeError("must be called from async context")
        return running[0]

    monkeypatch.setitem(sys.modules, "trio.lowlevel", SimpleNamespace(current_task=current_task))
    tasks = {name: Task() for name in ("one", "two", "three")}
    return lambda name: running.__setitem__(0, tasks.get(name))


def test_two_tasks_do_not_enter_one_anothers_lock(new_lock, run_as):
    run_as("one")
    with new_lock() as lease:
        run_as("two")
        assert not new_lock().acquire(blocking=False)
        with pytest.raises(LockConflictError), new_lock(timeout=0.05):
            pass
        with pytest.raises(LockError, match=r"another task of this trio loop.*trio\.to_thread"):
            new_lock().acquire()
        with pytest.raises(LockNotOwnedError):
            new_lock().release()
        assert new_lock().lease is None

        run_as("one")
        with new_lock() as again:
            assert again.token == lease.token

    run_as("two")
    with new_lock(timeout=1):
        pass


def test_each_task_takes_units_of_its_own(new_lock, run_as):
    for task in ("one", "two"):
        run_as(task)
        assert new_lock(capacity=2).acquire(timeout=1)
    run_as("three")
    assert not new_lock(capacity=2).acquire(blocking=False)

    for task in ("one", "two"):
        run_as(task)
        new_lock(capacity=2).release()
    assert not new_lock(capacity=2).locked()


def test_a_loop_in_a_thread_that_holds_the_lock_enters_it(new_lock, run_as):
    with new_lock() as around:
        run_as("one")
        with new_lock() as lease:
            assert lease.token == around.token
        run_as(None)


def test_what_a_thread_holds_around_its_loop_is_released_in_there(new_lock, run_as):
    new_lock().acquire()
    run_as("one")

    new_lock().release()

    assert not new_lock().locked()
