"""A task that is to run later has nothing to do with its key until then."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from tests.waiting import wait_until

WORKERS = [{"concurrency": 2}]  # one, so that what comes finds its key taken by a neighbour
SHARED = True

FAR_OFF = 3600.0  # seconds
SOON = 1.0


def send_for(site, key, seconds: float):
    """Send a task that reports when it runs; return it and its time, when the worker has it."""
    eta = datetime.now(UTC) + timedelta(seconds=seconds)
    result = site.tasks.report_time.apply_async((key,), eta=eta)
    site.workers[0].wait_log(f"[{result.id}] received")
    return result, eta.timestamp()


def check_free(site, key) -> None:
    """The key has neither holder nor waiter, and is granted."""
    state = site.look(key)
    assert (state.token, state.waiting) == (0, 0)
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0
    assert site.tasks.work_requeue.delay(key).get(timeout=30) == 0


def test_a_task_with_an_eta_leaves_its_key_to_others(site, key):
    send_for(site, key, FAR_OFF)

    check_free(site, key)


def test_a_task_with_an_eta_does_not_queue_behind_a_neighbour(site, key):
    holder = site.tasks.work_requeue.delay(key, None, key)
    site.journal.wait(key)

    send_for(site, key, FAR_OFF)

    assert site.look(key).waiting == 0
    site.journal.open(key)
    holder.get(timeout=30)
    check_free(site, key)


@pytest.mark.parametrize("busy", ["when it comes", "until after its time"])
def test_a_task_with_an_eta_runs_then_and_not_before(site, key, busy):
    holder = site.tasks.work_requeue.delay(key, None, key)
    site.journal.wait(key)
    result, eta = send_for(site, key, SOON)

    if busy == "until after its time":
        site.wait_queued(key)
        assert time.time() >= eta
    site.journal.open(key)
    holder.get(timeout=30)
    ran_at = result.get(timeout=30)

    assert ran_at >= eta


def test_a_woken_task_whose_eta_is_over_begins_before_what_was_fetched(site, key):
    with site.held(key):
        woken = site.tasks.report_time.apply_async((key,), countdown=0.1)
        site.wait_queued(key)
        gates = [f"{key}:{n}" for n in range(2)]
        busy = [site.tasks.work_requeue.delay(gate, None, gate) for gate in gates]
        for gate in gates:
            site.journal.wait(gate)
        fetched = [site.tasks.report_time.delay(f"{key}:fetched:{n}") for n in range(2)]
        for result in fetched:
            site.workers[0].wait_log(f"[{result.id}] received")
    wait_until(
        lambda: site.log().count(f"[{woken.id}] received") == 2,
        timeout=30.0,
        what="it to be received again",
    )

    site.journal.open(gates[0])  # one slot, so that one runs after the other

    assert woken.get(timeout=30) < min(result.get(timeout=30) for result in fetched)
    site.journal.open(gates[1])
    for result in busy:
        result.get(timeout=30)
