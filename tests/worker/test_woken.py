"""What becomes of a task that is woken and finds that things have changed."""

from __future__ import annotations

import uuid

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockKeyError
from celery_distlock.stores import open_store
from tests.waiting import wait_until

APP = "tests.apps.late"
WORKERS = [{"concurrency": 2}]


@pytest.fixture
def late(site):
    return site.tasks


@pytest.fixture
def name():
    return uuid.uuid4().hex


def lock(late, key):
    return Lock(key, store=open_store(late.app.conf.distlock_url, late.app.conf.distlock_prefix))


def wait_parked(late, key):
    # Not for its state, which is stored before it is parked.
    store = open_store(late.app.conf.distlock_url, late.app.conf.distlock_prefix)
    wait_until(lambda: store.inspect(key).waiting, what=f"a task to be parked at {key}")


def park_and_let_its_key_become(late, name, key):
    """A task that is parked at *name*, and woken when its key function says *key*."""
    late.memory.set(f"{late.NAME}key:{name}", name)
    with lock(late, name):
        result = late.changing.delay(name)
        wait_parked(late, name)
        late.memory.set(f"{late.NAME}key:{name}", key)
    return result


def records(late, name):
    left = late.memory.scan_iter(f"{late.app.conf.distlock_prefix}:*{name}*")
    return {key for key in left if key.rpartition(":")[2] in ("lock", "queue", "tasks", "woken")}


def test_a_task_of_two_keys_waits_for_one_after_the_other_and_runs_once(late, name):
    second = lock(late, f"b:{name}")
    with second:
        with lock(late, f"a:{name}"):
            result = late.two_keys.delay(name)
            wait_parked(late, f"a:{name}")
        wait_parked(late, f"b:{name}")

    assert result.get(timeout=30) == 1
    wait_until(lambda: not records(late, name), what="nothing to be left")
    assert late.memory.get(f"{late.NAME}runs:{name}") == "1"


def test_a_task_whose_key_has_become_none_runs_once(late, name):
    result = park_and_let_its_key_become(late, name, "")

    assert result.get(timeout=30) == 1
    wait_until(lambda: not records(late, name), what="nothing to be left that sends it again")


def test_a_task_whose_key_has_become_another_runs_once(late, name):
    result = park_and_let_its_key_become(late, name, f"{name}-moved")

    assert result.get(timeout=30) == 1
    wait_until(lambda: not records(late, name), what="nothing to be left that sends it again")


def test_a_task_whose_key_cannot_be_made_any_more_fails_once(late, name):
    result = park_and_let_its_key_become(late, name, "raise")

    with pytest.raises(LockKeyError, match="the order is gone"):
        result.get(timeout=30)
    wait_until(lambda: not records(late, name), what="nothing to be left that sends it again")


def test_a_child_that_needs_its_parents_key_is_named_as_a_deadlock(site, late, name):
    result = late.parent_that_waits.delay(name)
    wait_until(lambda: late.memory.get(f"{late.NAME}child:{name}"), what="the child")

    child = late.app.AsyncResult(late.memory.get(f"{late.NAME}child:{name}"))
    wait_parked(late, f"outer:{name}")
    site.workers[0].wait_log("a deadlock")
    late.memory.set(f"{late.NAME}gate:{name}", "open")

    result.get(timeout=30)
    assert child.get(timeout=30) == "child"
