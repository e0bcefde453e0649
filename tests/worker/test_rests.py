"""A key rests after its task: for `min_hold` from the grant, for `cooldown` after a success."""

from __future__ import annotations

import itertools
import os
import signal
import time

import pytest

from celery_distlock.errors import LockConflictError
from tests.waiting import wait_until

APP = "tests.apps.shares"
SHARED = True


def rests(site, key):
    return site.look(key).owner.startswith("parked:resting:")


def calls(site, key, count):
    return [when for when, _ in site.journal.wait(f"{key}:calls", count)]


def test_two_tasks_of_beat_run_once_a_period(site, key):
    results = [site.tasks.report.delay(key) for _ in range(2)]
    assert sorted(str(result.get(timeout=30)) for result in results) == ["None", "sent"]
    assert rests(site, key)

    site.wait_free(key)
    assert site.tasks.report.delay(key).get(timeout=30) == "sent"

    first, second = site.journal.read(f"{key}:reports")
    assert second - first > 2.9


def test_a_cooldown_follows_a_success(site, key):
    results = [site.tasks.call_api.delay(key) for _ in range(3)]

    for result in results:
        result.get(timeout=30)

    times = calls(site, key, 3)
    assert min(b - a for a, b in itertools.pairwise(times)) >= 1.5


@pytest.mark.parametrize("end", ["fail", "retry"])
def test_no_cooldown_follows_what_is_no_success(site, key, end):
    first = site.tasks.call_api.delay(key, end)
    wait_until(lambda: first.state in ("FAILURE", "RETRY", "SUCCESS"), what="its end")

    first_call, *_ = calls(site, key, 1)
    if end == "fail":
        site.tasks.call_api.delay(key).get(timeout=30)
    second_call = calls(site, key, 2)[1]

    assert second_call - first_call < 1.4


def test_a_key_that_cools_down_admits_no_task(site, key):
    stays = site.tasks.use.delay(key, gate=key)
    site.journal.wait(f"begun:{key}")
    site.tasks.cool_down.delay(key, 2.0).get(timeout=30)
    (cooled,) = site.journal.read(f"{key}:cooled")
    waits = site.tasks.use.delay(key, gate=f"{key}:waits")
    site.wait_queued(key)
    assert site.look(key).rest > 0

    site.journal.wait(f"begun:{key}:waits")
    begun = time.monotonic()
    for gate in (key, f"{key}:waits"):
        site.journal.open(gate)

    assert begun - cooled >= 1.9
    for result in (stays, waits):
        result.get(timeout=30)  # one that was inside goes on


def test_a_killed_task_leaves_no_rest(site, key):
    result = site.tasks.hold_for_long.delay(key, key)
    ((pid, _),) = site.journal.wait(f"begun:{key}")

    os.kill(pid, signal.SIGKILL)

    site.wait_free(key, timeout=site.tasks.LEASE)
    with pytest.raises(Exception, match="SIGKILL"):
        result.get(timeout=30)


def test_a_task_that_gets_only_one_of_its_keys_leaves_no_rest(site, key):
    """Nothing has run under the first one."""
    with site.held(f"{key}:b"):
        fails = site.tasks.rest_at_both.delay(f"{key}:a", f"{key}:b")
        with pytest.raises(LockConflictError):
            fails.get(timeout=30)

    site.wait_free(f"{key}:a")
