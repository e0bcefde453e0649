"""What celery-singleton and celery-once show in their documentation, said in our words, does so."""

from __future__ import annotations

import uuid

import pytest

from celery_distlock.errors import DuplicateTaskError
from tests.waiting import wait_until

SHARED = True


def test_a_singleton_is_queued_once(site, key):
    do_stuff = site.tasks.work_once["finished"]

    a = do_stuff.delay(key, 1, gate=key)
    b = do_stuff.delay(key, 1, gate=key)
    c = do_stuff.delay(f"{key}:4", 1, gate=key)

    assert a == b
    assert a != c
    site.journal.open(key)
    a.get(timeout=30)
    site.wait_free(key)
    d = do_stuff.delay(key, 1, gate=key)
    assert d != a
    for result in (c, d):
        result.get(timeout=30)


def test_only_one_for_each_user(site, key):
    do_something = site.tasks.once_for_each_key
    with site.held(key):
        task1 = do_something.delay(key=key, note=99)
        task2 = do_something.delay(key=key, note=100)

    assert task1 == task2
    task1.get(timeout=30)
    assert site.journal.read(key) == [99]


def test_a_duplicate_raises(site, key):
    do_something = site.tasks.work_once["raise"]
    with site.held(key):
        task1 = do_something.delay(key, "bob")
        with pytest.raises(DuplicateTaskError) as raised:
            do_something.delay(key, "bob")

    assert raised.value.task_id == task1.id
    task1.get(timeout=30)


def test_unlock_before_run_queues_another_one_while_it_runs(site, key):
    example = site.tasks.work_once["started"]
    first = example.delay(key, 1, key)
    site.journal.wait(key)

    second, third = example.delay(key, 1, key), example.delay(key, 1, key)

    assert first != second == third
    site.journal.open(key)
    second.get(timeout=30)
    assert site.journal.read(key) == [1, 1]


@pytest.mark.parametrize("how", ["delay", "apply_async"])
def test_a_call_that_is_queued_already_raises(site, key, how):
    example = site.tasks.work_once["raise"]

    def call() -> object:
        return example.delay(key, 10) if how == "delay" else example.apply_async(args=(key, 10))

    with site.held(key):
        first = call()
        with pytest.raises(DuplicateTaskError):
            call()

    first.get(timeout=30)
    call().get(timeout=30)  # type: ignore[attr-defined]


def test_calling_a_task_directly_is_not_affected(site, key):
    example = site.tasks.work_once["raise"]
    with site.held(key):
        first = example.delay(key, 10)

    first.get(timeout=30)
    assert example.apply((key, 10)).get() == 0
    assert example(key, 10) == 0


def test_different_arguments_are_different_calls(site, key):
    slow_add = site.tasks.work_once["raise"]
    with site.held(key):
        results = [slow_add.delay(key, 1), slow_add.delay(key, 2)]

    for result in results:
        result.get(timeout=30)
    assert sorted(site.journal.read(key)) == [1, 2]


def test_whatever_its_arguments_there_is_one(site, key):
    slow_add = site.tasks.once_for_all
    running = slow_add.delay(key, 1, key)
    site.journal.wait(key)

    with pytest.raises(DuplicateTaskError):
        slow_add.delay(f"{key}:2", 2)

    site.journal.open(key)
    running.get(timeout=30)


def test_a_task_that_takes_longer_than_the_time_is_another_one_after_it(site, key):
    runs_for_longer = site.tasks.work_once["two seconds"]
    task1 = runs_for_longer.delay(key, 1, key)
    again = runs_for_longer.delay(key, 1, key)

    def another() -> object:
        result = runs_for_longer.delay(key, 1, key)
        return None if result == task1 else result

    task2: object = wait_until(another, what="the time to be over")

    assert task1 == again != task2
    site.journal.open(key)
    task2.get(timeout=30)  # type: ignore[attr-defined]
    assert site.journal.read(key) == [1, 1]


def test_equal_uuids_are_the_same_argument(site, key):
    do_stuff, number = site.tasks.work_once["finished"], uuid.uuid4()
    with site.held(key):
        a, b = do_stuff.delay(key, number), do_stuff.delay(key, uuid.UUID(str(number)))
        c = do_stuff.delay(key, uuid.uuid4())

    assert a == b != c
    for result in (a, c):
        result.get(timeout=30)


def test_a_base_class_with_a_context_of_its_own(site, key):
    example_task = site.tasks.work_in_context

    assert example_task.delay(key).get(timeout=30) == "done"

    assert site.journal.read(key) == ["in its context"]
