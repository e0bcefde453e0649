"""What RabbitMQ could make different: how tasks wait, come again, and die."""

from __future__ import annotations

import pytest
from celery import chord

from tests.waiting import wait_until


def test_100_tasks_over_3_keys_neither_overlap_nor_get_lost(site, key):
    keys = [f"{key}:{number}" for number in range(3)]

    results = [site.tasks.count.delay(keys[number % 3]) for number in range(100)]
    for result in results:
        result.get(timeout=90)

    assert [site.journal.read(f"{each}:overlaps") for each in keys] == [[], [], []]
    assert [site.journal.get(each) for each in keys] == [34, 33, 33]


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_tasks_that_were_parked_run(site, key, way):
    with site.held(key):
        results = [site.tasks.work_requeue.delay(key, number) for number in range(10)]
        site.wait_queued(key, 10)
        assert {result.state for result in results} == {"PARKED"}
        if way == "broker":
            site.forget_channel(key)

    assert [result.get(timeout=60) for result in results] == [0] * 10
    assert sorted(site.journal.read(key)) == list(range(10))


@pytest.mark.parametrize("name", ["square", "square_retry"])
def test_a_chord_over_one_key_completes(site, key, name):
    square = getattr(site.tasks, name)

    result = chord(square.s(key, number) for number in range(10))(site.tasks.total.s())

    assert result.get(timeout=60) == 285
    assert site.journal.read(f"{key}:overlaps") == []


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_chord_whose_members_are_all_parked_first_completes(site, key, way):
    with site.held(key):
        result = chord(site.tasks.square.s(key, n) for n in range(10))(site.tasks.total.s())
        site.wait_queued(key, 10)
        if way == "broker":
            site.forget_channel(key)

    assert result.get(timeout=60) == 285


@pytest.mark.parametrize("name", ["work_retry", "work_retry_and_retry_itself"])
def test_retries_by_conflict_do_not_count_as_retries(site, key, name):
    task = getattr(site.tasks, name)
    watched = f"watched-{key}"
    with site.held(watched):
        result = task.delay(watched)
        site.journal.wait(f"signals:{watched}", 6)  # conflicts
        assert result.state == "PARKED"

    assert result.get(timeout=30) == task.max_retries


@pytest.mark.faults
@pytest.mark.parametrize("way", ["at once", "channel", "broker"])
def test_a_task_whose_process_is_killed_runs_once_more(site, key, way):
    if way == "at once":
        result = site.tasks.kill_itself_once.delay(key)
    else:
        with site.held(key):
            result = site.tasks.kill_itself_once.delay(key)
            site.wait_queued(key)
            if way == "broker":
                site.forget_channel(key)

    wait_until(lambda: result.state == "SUCCESS", timeout=60, what="the second run's success")
    site.tasks.work_requeue.delay(key, "next").get(timeout=30)
    assert site.journal.read(key) == [None, None, "next"]


def test_a_task_that_rejects_itself_comes_again_and_gets_its_key(site, key):
    assert site.tasks.reject_once.delay(key).get(timeout=30) == "done"
    assert site.journal.read(key) == [None, None]
