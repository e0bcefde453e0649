"""Calls that come shortly one after the other are one run, with what came last."""

from __future__ import annotations

import time

import pytest

from tests.waiting import wait_until

SHARED = True

DELAY, MAX_DELAY = 1.0, 2.0  # seconds, as in `tests.apps.locked`


def test_calls_in_a_row_run_once_with_the_last_arguments(site, key):
    task = site.tasks.work_once["debounce"]

    results = [task.delay(key, number) for number in range(10)]
    last = time.monotonic()

    assert len({result.id for result in results}) == 1
    assert [result.joined for result in results] == [False] + [True] * 9
    results[0].get(timeout=30)
    assert time.monotonic() - last >= DELAY - 0.1
    assert site.journal.read(key) == [9]


def test_calls_for_other_keys_are_others(site, key):
    task = site.tasks.work_once["debounce"]

    results = [task.delay(f"{key}:{number}", number) for number in range(3)]

    for result in results:
        result.get(timeout=30)
    assert len({result.id for result in results}) == 3


def test_a_stream_of_calls_is_run_after_the_longest_delay(site, key):
    task = site.tasks.work_once["bounded"]
    begin = time.monotonic()
    first = task.delay(key, "first")

    def calls_on() -> bool:
        task.delay(key, "later")
        return first.ready()

    wait_until(calls_on, timeout=20.0, what="the first run")
    task.delay(key, "later")  # the last one may have come before the first run began

    assert time.monotonic() - begin >= MAX_DELAY - 0.1
    wait_until(lambda: len(site.journal.read(key)) == 2, what="the rest of the stream to run")
    assert site.journal.read(key)[0] == "later"


def test_a_call_while_it_runs_is_not_lost(site, key):
    task = site.tasks.work_once["debounce"]
    first = task.delay(key, "first", key)
    site.journal.wait(key)

    later = [task.delay(key, number, key) for number in range(3)]

    assert first.id not in {result.id for result in later}
    site.journal.open(key)
    later[0].get(timeout=30)
    assert site.journal.read(key) == ["first", 2]


def test_a_call_that_is_waited_for_by_its_id_is_not_deferred(site, key):
    task = site.tasks.work_once["debounce"]
    begin = time.monotonic()
    deferred = task.delay(key, "deferred")

    task.apply_async((key, "mine"), task_id=f"mine-{key}").get(timeout=30)

    deferred.get(timeout=30)
    assert time.monotonic() - begin >= DELAY - 0.1
    assert site.journal.read(key) == ["mine", "deferred"]


@pytest.mark.parametrize("rule", ["bounded", "leading"])
def test_no_call_starts_before_its_own_countdown(site, key, rule):
    task = site.tasks.work_once[rule]
    task.apply_async((key, "first"), countdown=4.0)
    begin = time.monotonic()

    task.apply_async((key, "last"), countdown=4.0).get(timeout=30)

    assert time.monotonic() - begin >= 4.0 - 0.1
    assert site.journal.read(key) == ["last"]


def test_the_first_of_a_quiet_time_may_start_at_once(site, key):
    task = site.tasks.work_once["leading"]

    results = [task.delay(key, number) for number in range(5)]

    assert results[0].id != results[1].id
    assert len({result.id for result in results[1:]}) == 1
    for result in results:
        result.get(timeout=30)
    assert site.journal.read(key) == [0, 4]
