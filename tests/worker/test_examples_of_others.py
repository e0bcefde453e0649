"""What celery-singleton and celery-once show in their documentation, said in our words, does so."""

from __future__ import annotations

import pytest

from celery_distlock.errors import DuplicateTaskError


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
