"""Events of locks: there where the worker sends events, and of no harm to readers."""

from __future__ import annotations

import pytest

from tests.waiting import wait_until

WORKERS = [{"concurrency": 2, "args": ["--task-events"]}]
SHARED = True


def test_a_parked_task_is_reported_from_its_conflict_to_its_release(site, listener, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key)
        site.wait_queued(key)
    result.get(timeout=30)

    kinds = ["conflict", "parked", "acquired", "woken", "released"]
    wait_until(lambda: {*kinds} <= {*listener.kinds(key)}, what="all events", timeout=60)
    # One process reports the first two, perhaps another the rest, and perhaps sooner.
    reported = sorted(listener.of(key), key=lambda event: event["timestamp"])
    reported = [event for event in reported if event["type"] != "distlock-renewed"]
    assert [event["type"].removeprefix("distlock-") for event in reported] == kinds
    assert {event["uuid"] for event in reported} == {result.id}
    assert {event["task"] for event in reported} == {"work_requeue"}
    assert {event["hostname"] for event in reported} == {site.workers[0].name}
    assert reported[2]["waited"] > 0


def test_a_parked_task_is_shown_as_parked_until_it_runs(site, listener, key):
    gate = f"{key}:gate"
    with site.held(key):
        result = site.tasks.work_requeue.delay(key, gate=gate)
        wait_until(lambda: state(listener, result) == "PARKED", what="it to be shown as parked")
    wait_until(lambda: state(listener, result) == "RUNNING", what="it to be shown as running")

    site.journal.open(gate)
    wait_until(lambda: state(listener, result) == "SUCCESS", what="its success")


@pytest.mark.parametrize("when", ["parked", "running"])
def test_a_parked_task_that_is_revoked_is_shown_as_that(site, listener, key, when):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key, gate=f"{key}:gate")
        wait_until(lambda: state(listener, result) == "PARKED", what="it to be shown as parked")
        if when == "parked":
            result.revoke()
            site.workers[0].wait_log(f"Tasks flagged as revoked: {result.id}")
    if when == "running":
        wait_until(lambda: state(listener, result) == "RUNNING", what="it to be shown as running")
        result.revoke(terminate=True)

    wait_until(lambda: state(listener, result) == "REVOKED", what="it to be shown as revoked")


def test_a_task_that_is_parked_on_its_arrival_is_shown_with_its_name(site, listener, key):
    gate = f"{key}:gate"
    first = site.tasks.work_requeue.delay(key, gate=gate)
    wait_until(lambda: site.look(key).owner, what="the first to have the key")
    second = site.tasks.work_requeue.delay(key)
    wait_until(lambda: state(listener, second) == "PARKED", what="it to be shown as parked")

    assert listener.state.tasks[second.id].name == "work_requeue"
    site.journal.open(gate)
    for result in (first, second):
        result.get(timeout=30)


def test_a_task_that_sends_no_events_is_not_shown_as_running_for_ever(site, listener, key):
    with site.held(key):
        result = site.tasks.work_without_events.delay(key)
        site.wait_queued(key)
    result.get(timeout=30)

    wait_until(lambda: "released" in listener.kinds(key), what="the last event", timeout=60)
    assert state(listener, result) is None


def test_the_state_of_a_task_is_not_disturbed_by_them(site, listener, key):
    result = site.tasks.work_requeue.delay(key)
    result.get(timeout=30)

    wait_until(lambda: "released" in listener.kinds(key), what="the last event", timeout=60)
    wait_until(lambda: state(listener, result) == "SUCCESS", what="its success")


def state(listener, result):
    """What the events say of a task; None before the first."""
    task = listener.state.tasks.get(result.id)
    return task and task.state


def test_a_key_that_is_freed_for_a_killed_process_is_reported(site, listener, key):
    site.tasks.die.delay(key, "exit")

    wait_until(lambda: "freed" in listener.kinds(key), what="the event", timeout=60)
    (freed,) = [event for event in listener.of(key) if event["type"] == "distlock-freed"]
    assert freed["reason"] == "its process is gone"
