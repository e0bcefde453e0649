"""Several tasks at once under one key of a store in the worker's own memory."""

from __future__ import annotations

import pytest

from tests.worker.units import faults, held, most_used

APP = "tests.apps.shares"
pytestmark = pytest.mark.usefixtures("lupa")

ENV = {"DISTLOCK_TEST_STORE": "memory://"}
WORKERS = [{"pool": "threads", "concurrency": 6}]


def judge(site, key, results):
    for result in results:
        result.get(timeout=60)
    notes = held(site, key)
    assert not list(faults(notes))
    assert len({note["task"] for note in notes}) == len(results)
    return notes


@pytest.mark.parametrize("kind", ["use", "use_by_code", "use_waiting"])
def test_a_capacity_of_three_is_used_by_three_tasks_at_once_and_never_by_four(site, key, kind):
    results = [getattr(site.tasks, kind).delay(key, 0.02) for _ in range(60)]

    assert most_used(judge(site, key, results)) == 3


def test_readers_run_with_readers_and_not_with_a_writer(site, key):
    kinds = [site.tasks.write if number % 5 == 0 else site.tasks.read for number in range(60)]
    results = [kind.delay(key, 0.02) for kind in kinds]

    assert most_used(judge(site, key, results)) > 1


def test_weights_are_counted(site, key):
    kinds = [site.tasks.use, site.tasks.use_two, site.tasks.use_all]
    results = [kinds[number % 3].delay(key, 0.02) for number in range(45)]

    assert most_used(judge(site, key, results)) == 3


def test_several_keys_in_mixed_modes(site, key):
    results = [
        site.tasks.use_mixed.delay(*[f"{key}:{(number + n) % 5}" for n in range(3)])
        for number in range(60)
    ]

    judge(site, key, results)


def test_a_task_that_shares_its_key_calls_one_that_has_it_alone(site, key):
    results = [site.tasks.read.delay(key, 0.3) for _ in range(2)]
    results.append(site.tasks.read_then_write.delay(key))

    shared, alone, again, shares = results[-1].get(timeout=30)

    assert shared < alone < again
    assert shares is True
