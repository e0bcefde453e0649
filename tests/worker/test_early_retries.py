"""
A retry whose message comes before the attempt that sent it has ended and left the key to it.

So does what replaces a task (`self.replace`).
"""

from __future__ import annotations

import pytest

from tests.waiting import wait_until

SHARED = True


@pytest.mark.parametrize(
    "policy", ["requeue", "two keys", "retry", "wait", "wait and skip", "skip", "fail"]
)
def test_it_runs_before_all_others_when_that_attempt_has_ended(site, key, policy):
    first = site.tasks.retry_early[policy].delay(key, "first", key)
    site.journal.wait(key)
    if policy == "wait":
        site.wait_queued(key)
    else:
        wait_until(lambda: first.state == "PARKED", what="the retry to find its key taken")
    other = site.tasks.work_requeue.delay(key, "other")
    wait_until(lambda: other.state == "PARKED", what="another one to wait")
    site.journal.open(key)

    assert first.get(timeout=20) == 1  # the key would be kept for minutes
    assert other.get(timeout=30) == 0
    assert site.journal.read(key) == [["first", 0], ["first", 1], "other"]


def test_it_is_not_taken_for_a_second_call_of_what_is_sent_once(site, key):
    first = site.tasks.retry_early["unique"].delay(key, 1, key)
    site.journal.wait(key)
    other = site.tasks.retry_early["unique"].delay(key, 1, key)  # its identity is free again
    assert not other.joined
    site.journal.open(key)

    assert (first.get(timeout=30), other.get(timeout=30)) == (1, 1)


def has_come(site, key) -> bool:
    """Whether something has found the key taken, and is to come again."""
    lines = site.log().splitlines()
    sent_again = any("is sent again" in line and key in line for line in lines)
    return sent_again or bool(site.look(key).waiting)


@pytest.mark.parametrize("policy", ["requeue", "skip", "fail"])
@pytest.mark.parametrize(("by", "runs"), [("task", [1, 0]), ("chain", [1, 0, 0])])
def test_what_replaces_a_task_is_not_refused_for_that_one(site, key, policy, by, runs):
    result = site.tasks.replace_early[policy].delay(key, 1, by, key)
    site.journal.wait(key)
    wait_until(lambda: has_come(site, key), timeout=30.0, what="what replaces it to come")
    site.journal.open(key)

    assert result.get(timeout=30) == "done"
    assert site.journal.read(key) == runs
