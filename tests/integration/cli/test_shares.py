"""What the commands show of, and do to, tasks that run under one key at once."""

from __future__ import annotations

import json

import pytest

from celery_distlock.errors import LockLostError
from tests.integration.cli.test_acting import wait_parked
from tests.waiting import wait_until

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 5}]


@pytest.fixture
def three(site, key):
    """Three tasks that hold all three units of *key* until its gate is open."""
    results = [site.tasks.use.delay(key, 0, key) for _ in range(3)]
    wait_until(lambda: site.look(key).used == 3, timeout=60, what="all to begin")
    yield results
    site.journal.open(key)
    for result in results:
        if result.id in {hold.run.partition(":")[0] for hold in site.look(key).holders}:
            result.get(timeout=60)
    site.store.units.set_limit(key, None)


def test_tasks_that_share_a_key_are_shown_with_their_slots(site, invoke, key, three):
    record = json.loads(invoke("list", key, "--json").stdout)

    assert (record["mode"], record["units"], record["capacity"]) == ("shared", 3, 3)
    assert {hold["task_id"] for hold in record["holders"]} == {result.id for result in three}
    assert sorted(hold["slot"] for hold in record["holders"]) == [0, 1, 2]
    assert {hold["pid"] for hold in record["holders"]} <= set(site.workers[0].children())
    assert "\tuse +2\t" in invoke("list", key).stdout


def test_a_limit_above_the_capacity_admits_the_next_in_addition_to_the_others(
    site, invoke, key, three
):
    parked = site.tasks.use.delay(key)
    wait_parked(site, key, parked.id)

    assert invoke("limit", key, "4").exit_code == 0

    assert parked.get(timeout=60) is None
    assert site.look(key).used == 3


def test_the_task_that_is_named_loses_the_key_and_the_others_run_on(site, invoke, key, three):
    victim, *others = three

    done = invoke("release", key, "--holder", victim.id, "--force")

    assert f"{key} was taken from use[{victim.id}] on " in done.stdout
    with pytest.raises(LockLostError):
        victim.get(timeout=60)
    assert {hold.run.partition(":")[0] for hold in site.look(key).holders} == {
        result.id for result in others
    }
    site.journal.open(key)
    for result in others:
        result.get(timeout=60)


def test_a_reader_that_waits_for_a_writer_is_shown_in_the_queue(site, invoke, key):
    writer = site.tasks.write.delay(key, 0, key)
    site.wait_held(key)
    reader = site.tasks.read.delay(key)
    wait_parked(site, key, reader.id)

    (waiter,) = json.loads(invoke("queue", key, "--json").stdout)["waiters"]

    assert (waiter["task"], waiter["units"], waiter["capacity"]) == ("read", 1, None)
    assert "\t1 of any" in invoke("queue", key).stdout
    site.journal.open(key)
    writer.get(timeout=60)
    reader.get(timeout=60)


def test_a_key_whose_task_has_ended_is_at_rest_until_it_is_released(site, invoke, key):
    site.journal.open(key)
    site.tasks.hold_for_long.delay(key, key).get(timeout=60)

    assert json.loads(invoke("show", key, "--json").stdout)["state"] == "resting"
    assert invoke("release", key, "--force").exit_code == 0
    assert not site.look(key).token
