"""Calls supersede one another while processes are killed; the last one runs, and no two at once."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from celery.exceptions import TaskRevokedError

from celery_distlock.errors import LockLostError

APP = "tests.apps.latest"
pytestmark = pytest.mark.faults


def kill_holder(site, key) -> None:
    """Kill the process that holds *key*, if there is one."""
    owner = site.look(key).owner.split("|")
    pids = [pid for worker in site.workers for pid in worker.children()]
    if len(owner) > 1 and int(owner[1]) in pids:
        with suppress(ProcessLookupError):
            os.kill(int(owner[1]), signal.SIGKILL)


def assert_no_overlap(notes) -> None:
    tokens = [token for _, _, token in notes]
    assert tokens == sorted(tokens)


def assert_none_comes_again(notes) -> None:
    """That a version which was asked to leave does not begin after that."""
    asked = set()
    for what, version, _ in notes:
        assert not (what == "begin" and version in asked), (version, notes)
        if what == "asked":
            asked.add(version)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_call_runs_and_what_was_asked_to_leave_does_not_come_again(site, key, seed):
    chance = random.Random(seed)
    results = []
    for version in range(12):
        seconds = chance.choice([0.05, 2.0, 20.0])
        results.append(site.tasks.preview.delay(key, version, seconds, 1.0))
        time.sleep(chance.choice([0.0, 0.02, 0.3, 1.5]))
        if chance.random() < 0.4:
            kill_holder(site, key)
    last = site.tasks.preview.delay(key, "last", 0.0)

    assert last.get(timeout=90) == "last"
    for result in results:
        with suppress(TaskRevokedError, LockLostError):  # none of them hangs
            result.get(timeout=90)
    site.wait_free(key)

    notes = site.journal.read(key)
    assert_no_overlap(notes)
    assert_none_comes_again(notes)
