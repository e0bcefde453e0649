"""What is parked by a worker that is gone runs in another one, past what waits in the broker."""

from __future__ import annotations

import json
import os
import signal
import time
import uuid

import pytest

from tests.waiting import wait_until

APP = "tests.apps.deploys"
KNOWS_MORE = "DISTLOCK_TEST_DEPLOYS_KNOWS_MORE"
POLICY = "DISTLOCK_TEST_DEPLOYS_POLICY"
UNLOCKED = "DISTLOCK_TEST_DEPLOYS_UNLOCKED"
MOVED = "DISTLOCK_TEST_DEPLOYS_MOVED"
ENV = {KNOWS_MORE: "1"}
MANY = 20
MOST = 5.0  # seconds; on a calm machine a tenth of that


def park(site, key, *, count=MANY, **options):
    for number in range(count):
        site.tasks.brief.apply_async((key, number), **options)
    site.wait_queued(key, count)


def burden(site, seconds, *, slots=2, each=0.02):
    """Send work of *seconds* for *slots* slots, and wait until it has begun."""
    pauses = f"pauses-{uuid.uuid4()}"
    for _ in range(round(seconds * slots / each)):
        site.tasks.pause.delay(each, pauses)
    site.journal.wait(pauses)


def took(site, key, released_at, count=MANY):
    notes = site.journal.wait(key, count, timeout=60.0)
    assert sorted(number for number, *_ in notes) == list(range(count))
    print("begun after", *(f"{at - released_at:.2f}" for _, at, _ in notes))  # noqa: T201
    return notes[-1][1] - released_at


def receipts(worker):
    lines = worker.log().splitlines()
    return sum("deploys.brief[" in line and line.endswith(" received") for line in lines)


@pytest.mark.faults
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("end", ["warm", "killed"])
def test_tasks_that_a_worker_has_parked_before_it_was_gone_pass_the_backlog(
    bare_site, start, key, end, pool
):
    site = bare_site
    with site.held(key):
        old = start(concurrency=2)
        park(site, key)
        start(concurrency=2, pool=pool)
        if end == "warm":
            old.stop()
        else:
            old.kill(whole=True)
        burden(site, 15.0)
        released_at = time.time()
    seconds = took(site, key, released_at)
    print(f"{pool}, {end}: {MANY} tasks in {seconds:.2f} s")  # noqa: T201

    assert seconds < MOST


def test_a_worker_of_another_queue_is_given_nothing(bare_site, start, key):
    site = bare_site
    with site.held(key):
        old = start()
        park(site, key, count=3)
        start(args=["-Q", "other"])
        new = start()
        old.stop()

    notes = site.journal.wait(key, 3)

    assert {worker for *_, worker in notes} == {new.name}


def test_a_worker_that_consumes_a_queue_no_more_is_given_nothing_of_it(bare_site, start, key):
    site = bare_site
    control = site.tasks.app.control
    with site.held(key):
        old = start()
        park(site, key, count=3)
        cancelled, new = start(), start()
        control.cancel_consumer("celery", destination=[cancelled.name], reply=True)
        takers = lambda: len(site.store.channels.find_channels(["celery"]))  # noqa: E731
        wait_until(lambda: takers() == 2, what="the queue to be cancelled")
        old.stop()
        wait_until(lambda: takers() == 1, what="the old worker to be gone")
        control.add_consumer("other", destination=[cancelled.name], reply=True)
        wait_until(lambda: site.store.channels.find_channels(["other"]), what="another queue")

    notes = site.journal.wait(key, 3)

    assert {worker for *_, worker in notes} == {new.name}


def test_a_queue_without_a_consumer_keeps_its_tasks_for_a_later_one(bare_site, start, key):
    site = bare_site
    with site.held(key):
        old = start(args=["-Q", "other"])
        park(site, key, count=3, queue="other")
        start(args=["-Q", "celery"])
        old.stop()

    site.wait_queued(key, 2)
    new = start(args=["-Q", "other"])
    notes = site.journal.wait(key, 3)

    assert {worker for *_, worker in notes} == {new.name}


def test_what_a_full_worker_cannot_begin_is_begun_by_one_that_has_a_free_slot(
    bare_site, start, key
):
    site = bare_site
    with site.held(key):
        full = start()
        park(site, key, count=1)
        site.tasks.pause.delay(60.0, f"{key}:pauses")
        site.journal.wait(f"{key}:pauses")
        free = start(concurrency=2)
        released_at = time.time()

    assert took(site, key, released_at, count=1) < MOST
    (note,) = site.journal.read(key)
    assert note[2] == free.name
    full.kill(whole=True)


def test_what_a_full_worker_cannot_begin_is_not_begun_by_one_of_its_other_queue(
    bare_site, start, key
):
    site = bare_site
    with site.held(key):
        full = start(args=["-Q", "celery,other"])
        park(site, key, count=1)
        site.tasks.pause.delay(60.0, f"{key}:pauses")
        site.journal.wait(f"{key}:pauses")
        start(args=["-Q", "other"])
    wait_until(lambda: receipts(full) == 2, what="the task to be pushed")
    right = start(args=["-Q", "celery"])

    (note,) = site.journal.wait(key)
    assert note[2] == right.name
    full.kill(whole=True)


@pytest.mark.faults
def test_what_waits_in_a_worker_that_dies_is_begun_by_another(bare_site, start, key):
    site = bare_site
    with site.held(key):
        doomed = start()
        park(site, key, count=1)
        site.tasks.pause.delay(60.0, f"{key}:pauses")
        site.journal.wait(f"{key}:pauses")
    wait_until(lambda: receipts(doomed) == 2, what="the task to be pushed")
    doomed.kill(whole=True)
    died_at = time.time()
    start()

    assert took(site, key, died_at, count=1) < 4 * MOST


@pytest.mark.faults
def test_a_suspended_worker_costs_its_parked_tasks_one_wait(bare_site, start, key):
    site = bare_site
    with site.held(key):
        still = start()
        park(site, key, count=10)
        start()
        still.pause()
        released_at = time.time()
    seconds = took(site, key, released_at, count=10)
    print(f"10 tasks in {seconds:.2f} s")  # noqa: T201

    assert seconds < 3 * MOST
    still.resume()


def test_what_a_worker_does_not_know_comes_to_one_that_does(bare_site, start, key):
    site = bare_site
    with site.held(key):
        old = start()
        site.tasks.of_the_new_version.delay(key)
        site.wait_queued(key)
        ignorant = start(env={KNOWS_MORE: ""})
        old.stop()
    ignorant.wait_log("its task is no locked task of this app")
    start()

    site.journal.wait(key, timeout=120.0)


@pytest.mark.faults
@pytest.mark.parametrize("moved", ["{key}", "{key}:new", ""])
def test_a_late_acknowledged_task_whose_key_a_deploy_has_changed_outlives_its_process(
    bare_site, start, key, moved
):
    """It was parked at the key of before, where nothing keeps it while it runs."""
    site, new = bare_site, {MOVED: moved}
    with site.held(key):
        old = start()
        site.tasks.at_another_key.delay(key)
        site.wait_queued(key)
        doomed = start(env=new)
        old.stop()
    (keys,) = site.journal.wait(key)
    assert keys == [moved.format(key=key) or key]
    (child,) = doomed.children()
    os.kill(child, signal.SIGKILL)
    site.journal.open(key)

    site.journal.wait(f"{key}:end", timeout=60.0)
    assert len(site.journal.read(key)) == 2


@pytest.mark.faults
def test_a_late_acknowledged_task_outlives_its_process_where_its_key_is_changed_back(
    bare_site, start, key
):
    """The broker has its message, by which it has ended at neither key."""
    site = bare_site
    site.tasks.at_another_key.apply_async((key,), lock_via="store")
    doomed = start(env={MOVED: "{key}:new"})
    assert site.journal.wait(key) == [[f"{key}:new"]]
    (child,) = doomed.children()
    site.app.control.cancel_consumer("celery", reply=True, timeout=30.0, limit=1)
    os.kill(child, signal.SIGKILL)
    start()
    site.journal.open(key)

    site.journal.wait(f"{key}:end", timeout=60.0)
    assert site.journal.read(key)[-1] == [key]


@pytest.mark.parametrize("also", ["", "{key} "])
def test_a_task_whose_keys_a_deploy_has_changed_runs_where_that_is_taken_back(
    bare_site, start, key, also
):
    """It leaves the key of before to wait at the new one, and comes back."""
    site, old, new = bare_site, {MOVED: f"{also}{{key}}:old"}, {MOVED: f"{also}{{key}}:new"}
    with site.held(f"{key}:new"):
        with site.held(f"{key}:old"):
            before = start(env=old)
            site.tasks.at_other_keys.delay(key)
            site.wait_queued(f"{key}:old")
            between = start(env=new)
            before.stop()
        site.wait_queued(f"{key}:new")
        start(env=old)
        between.stop()

    (keys,) = site.journal.wait(f"{key}:begun")
    assert set(keys) == set(old[MOVED].format(key=key).split())


def test_a_call_through_the_store_of_a_task_that_is_locked_no_more_is_not_sent_again(
    bare_site, start, key
):
    site = bare_site
    site.tasks.locked_no_more.delay(key)
    assert site.look(key).woken

    start(env={UNLOCKED: "1"})
    site.journal.wait(key)

    now = site.look(key)
    assert (now.woken, now.token) == (0, 0)


def under_another_prefix(site):
    prefix = f"{site.env['DISTLOCK_TEST_PREFIX']}:new"
    return {"DISTLOCK_TEST_DEPLOYS": json.dumps({"distlock_prefix": prefix})}


def test_workers_of_another_prefix_neither_wait_for_a_key_nor_run_what_is_parked(
    bare_site, start, key
):
    site = bare_site
    with site.held(key):
        old = start()
        park(site, key, count=1)
        old.stop()
        new = start(env=under_another_prefix(site))
        site.tasks.brief.delay(key, 1)
        ((number, *_),) = site.journal.wait(key)
        assert number == 1
    wait_until(lambda: site.look(key).woken or site.look(key).waiting, what="it to be there")
    new.stop()
    start()

    assert [number for number, *_ in site.journal.wait(key, 2)] == [1, 0]


def test_a_call_through_the_store_of_another_prefix_stays_there_though_it_has_run(
    bare_site, start, key
):
    site = bare_site
    site.tasks.locked_no_more.delay(key)
    start(env=under_another_prefix(site))

    assert len(site.journal.wait(key)) == 1
    assert site.look(key).woken  # and is sent again


def start_late(site, start, key, gate, policy):
    """
    Park a task, and have a worker with a new policy start it when *gate* is opened.

    Its key, for which it is woken before, may be taken by others until then.
    """
    with site.held(key):
        old = start()
        site.tasks.of_another_policy.delay(key)
        site.wait_queued(key)
        new = start(env={POLICY: policy})
        old.stop()
        site.tasks.pass_gate.delay(gate)
        site.journal.wait(gate)
    return new


@pytest.mark.parametrize(
    ("policy", "end", "runs"),
    [("skip", "skipped", 0), ("fail", "raised expected", 0), ("retry", "is sent again", 1)],
)
def test_a_parked_task_that_finds_its_key_taken_under_a_new_policy_is_not_sent_by_the_store(
    bare_site, start, key, policy, end, runs
):
    site, gate = bare_site, f"{key}:gate"
    new = start_late(site, start, key, gate, policy)
    with site.held(key):
        site.journal.open(gate)
        new.wait_log(end)

        wait_until(lambda: not site.look(key).woken, what="the store to forget it")
    assert len(site.journal.wait(key, runs, timeout=90.0)) == runs


def test_a_parked_task_that_waits_in_its_process_under_a_new_policy_is_not_sent_again(
    bare_site, start, key
):
    site, gate = bare_site, f"{key}:gate"
    start_late(site, start, key, gate, "wait")
    with site.held(key):
        site.journal.open(gate)
        site.wait_queued(key)

        assert not site.look(key).woken
    assert len(site.journal.wait(key)) == 1
