"""A deploy changes the key of a task that workers of both releases were given: it runs once."""

from __future__ import annotations

import os
import signal

import pytest
import redis

from tests import parked_runs
from tests.waiting import wait_until

APP = "tests.apps.deploys"

LATE, EARLY = "at_another_key", "early_at_another_key"
MOVED, TERMS, POLICY = (f"DISTLOCK_TEST_DEPLOYS_{each}" for each in ("MOVED", "TERMS", "POLICY"))
FEW = {TERMS: '{"capacity": 2}'}
MANY_BY_RATE = {TERMS: '{"shared": true, "rate": "50/s"}'}
# What the old and the new release say, and the new one's key.
ANOTHER_KEY = ({}, {MOVED: "{key}:new"}, "{key}:new")
NO_KEY = ({}, {MOVED: ""}, "{key}")
OTHERS = {
    "another key of several holders": (FEW, {MOVED: "{key}:new", **FEW}, "{key}:new"),
    "several holders": ({}, FEW, "{key}"),
    "one holder": (FEW, {}, "{key}"),
    "a rate": ({}, MANY_BY_RATE, "{key}"),
    "no rate": (MANY_BY_RATE, {}, "{key}"),
    **{policy: ({}, {POLICY: policy}, "{key}") for policy in ("skip", "fail", "retry", "wait")},
}
CHANGES = pytest.mark.parametrize(
    ("task", "change"),
    [
        pytest.param(LATE, ANOTHER_KEY, id=f"another key-{LATE}"),
        pytest.param(EARLY, ANOTHER_KEY, id=f"another key-{EARLY}", marks=pytest.mark.exhaustive),
        *(
            pytest.param(task, NO_KEY, id=f"no key-{task}", marks=pytest.mark.exhaustive)
            for task in (LATE, EARLY)
        ),
        *(
            pytest.param(LATE, OTHERS[name], id=name, marks=pytest.mark.exhaustive)
            for name in OTHERS
        ),
    ],
)


def receipts(worker, task):
    lines = worker.log().splitlines()
    return sum(f"deploys.{task}[" in line and line.endswith(" received") for line in lines)


def fill(site, worker, gate):
    """Keep the only slot of *worker* until *gate* is opened."""
    site.tasks.pass_gate.delay(gate)
    site.journal.wait(gate)


def wait_given_away(site, key):
    """Wait until a worker that has parked it, and has no slot, gives it to another one, too."""
    tasks = site.record(key, "tasks")
    with redis.Redis.from_url(site.env["DISTLOCK_TEST_BROKER"]) as client:
        wait_until(
            lambda: any("d" in of for of in parked_runs.records(client, tasks).values()),
            what="it to be given to another worker",
        )


def end(site, key, *workers):
    """Stop *workers*, and return the keys under which the task has run, and how often it ended."""
    for worker in workers:
        worker.stop()
    return site.journal.read(key), len(site.journal.read(f"{key}:end"))


def test_calls_of_both_releases_run_at_the_same_time_under_their_own_keys(bare_site, start, key):
    site = bare_site
    for queue, env in (("celery", {}), ("other", {MOVED: "{key}:new"})):
        start(env=env, args=["-Q", queue])
        site.app.tasks[f"{APP}.{LATE}"].apply_async((key,), queue=queue)
    keys = site.journal.wait(key, 2)

    assert sorted(keys) == [[key], [f"{key}:new"]]
    site.journal.open(key)


@CHANGES
def test_it_does_not_run_in_the_old_worker_while_it_runs_in_the_new_one(
    bare_site, start, key, task, change
):
    site, gate = bare_site, f"{key}:gate"
    before, after, new_key = change
    with site.held(key):
        old = start(env=before)
        site.app.tasks[f"{APP}.{task}"].delay(key)
        site.wait_queued(key)
        fill(site, old, gate)
        new = start(env=after)
    expected = [[new_key.format(key=key)]]
    assert site.journal.wait(key) == expected

    site.journal.open(gate)
    old.wait_log("deferred: an earlier delivery of its message")
    assert site.journal.read(key) == expected
    site.journal.open(key)
    site.journal.wait(f"{key}:end")
    assert end(site, key, old, new) == (expected, 1)


@CHANGES
@pytest.mark.faults
@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_it_does_not_run_in_the_new_worker_while_it_runs_in_the_old_one(
    bare_site, start, key, task, change, dies
):
    """The new worker is given it and stalls, and the old one begins it in between."""
    site, gate = bare_site, f"{key}:gate"
    before, after, _ = change
    with site.held(key):
        old = start(env=before)
        site.app.tasks[f"{APP}.{task}"].delay(key)
        site.wait_queued(key)
        fill(site, old, gate)
        new = start(env=after)
        wait_until(
            lambda: len(site.store.channels.find_channels(["celery"])) == 2, what="both workers"
        )
        new.pause()
    wait_until(lambda: receipts(old, task) == 2, what="the old worker to be given it")
    wait_given_away(site, key)
    site.journal.open(gate)
    assert site.journal.wait(key) == [[key]]

    new.resume()
    wait_until(lambda: receipts(new, task), what="the new worker to receive it")
    assert site.journal.read(key) == [[key]]
    if dies:
        (child,) = old.children()
        os.kill(child, signal.SIGKILL)
    site.journal.open(key)
    site.journal.wait(f"{key}:end", timeout=60.0)
    runs, ends = end(site, key, old, new)
    assert (len(runs), ends) == (1 + dies, 1)
