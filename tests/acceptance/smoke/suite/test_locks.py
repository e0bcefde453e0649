from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup

from celery_distlock.testing import assert_free, assert_locked, assert_parked
from tests.acceptance.smoke.suite import tasks
from tests.waiting import wait_until

PATIENCE = 60.0  # seconds


@pytest.fixture
def store(celery_setup: CeleryTestSetup) -> str:
    """Where the locks are: broker and result backend are one server, or the broker is none."""
    return celery_setup.app.conf.result_backend


@pytest.fixture
def client(celery_setup: CeleryTestSetup):
    return celery_setup.app.backend.client


def outcome(result):
    wait_until(result.ready, timeout=PATIENCE, what=f"the end of {result.id}")
    return result.get(timeout=PATIENCE)


def test_a_locked_task_runs(celery_setup, store):
    assert len(celery_setup.worker_cluster) == 2

    keys, held = outcome(tasks.look.delay("k"))

    assert (keys, held) == (["k"], True)
    assert_free("k", store, within=PATIENCE)


def test_tasks_of_one_key_do_not_overlap(celery_setup, client):
    results = [tasks.count.delay("k") for _ in range(20)]

    for result in results:
        outcome(result)

    assert int(client.get("count:k")) == 20


def test_a_parked_task_is_woken(celery_setup, store, client):
    holder = tasks.hold.delay("k")
    assert_locked("k", store, within=PATIENCE)
    parked = tasks.look.delay("k")
    assert_parked(parked, "k", store, within=PATIENCE)
    assert parked.state == "PARKED"

    tasks.let_go(client, "k")

    outcome(holder)
    assert outcome(parked) == [["k"], True]


def test_the_next_one_runs_after_its_holder_s_worker_is_killed(celery_setup, store):
    holder = tasks.hold_on_a_short_lease.delay("k")
    wait_until(lambda: holder.state == "STARTED", timeout=PATIENCE)
    assert_locked("k", store, within=PATIENCE)
    parked = tasks.look.delay("k")
    assert_parked(parked, "k", store, within=PATIENCE)

    (victim,) = (n for n in celery_setup.worker_cluster if n.hostname() == holder.info["hostname"])
    victim.kill()

    assert outcome(parked) == [["k"], True]
    assert_free("k", store, within=PATIENCE)


def test_held_and_parked_tasks_outlive_a_restart_of_the_broker(celery_setup, store, client):
    holder = tasks.hold.delay("k")
    assert_locked("k", store, within=PATIENCE)
    parked = tasks.look.delay("k")
    assert_parked(parked, "k", store, within=PATIENCE)

    celery_setup.broker.restart()
    assert_locked("k", store)
    assert_parked(parked, "k", store)
    tasks.let_go(client, "k")

    outcome(holder)
    assert outcome(parked) == [["k"], True]
    assert outcome(tasks.look.delay("other")) == [["other"], True]
