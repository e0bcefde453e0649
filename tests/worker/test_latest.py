"""The newest of a task's calls runs to its end, and what it supersedes leaves."""

from __future__ import annotations

import os
import signal
import time

import pytest
from celery import chord
from celery.exceptions import TaskRevokedError

from tests.waiting import wait_until

APP = "tests.apps.latest"


def begun(site, key):
    return [version for what, version, _ in site.journal.read(key) if what == "begin"]


def test_it_is_notified_within_about_a_second_however_long_its_lease(site, key):
    old = site.tasks.preview_for_long.delay(key, "old", 60.0)
    site.journal.wait(key)
    renewed = len(site.journal.wait(f"{key}:lease"))  # each second

    new = site.tasks.preview_for_long.delay(key, "new", 0.0)
    called_at = time.monotonic()

    assert new.get(timeout=30) == "new"
    assert time.monotonic() - called_at < 8.0  # a third of the lease were ten
    with pytest.raises(TaskRevokedError, match="recalled: superseded"):
        old.get(timeout=30)
    assert begun(site, key) == ["old", "new"]

    def since() -> list[str]:
        return site.journal.read(f"{key}:lease")[renewed:]

    wait_until(lambda: "lock_recalled" in since(), timeout=30, what="the note of the recall")
    assert since().index("lock_recalled") <= 3  # two were in flight, or are noted late


def test_of_several_calls_during_a_run_the_last_one_runs(site, key):
    old = site.tasks.preview.delay(key, 0, 60.0)
    site.journal.wait(key)

    results = [site.tasks.preview.delay(key, number, 0.0) for number in range(1, 4)]

    assert results[-1].get(timeout=30) == 3
    with pytest.raises(TaskRevokedError):
        old.get(timeout=30)
    assert [what for what, *_ in site.journal.read(key)] == [
        "begin",
        "asked",
        "end",
        "begin",
        "end",
    ]
    assert begun(site, key) == [0, 3]


def test_a_retry_that_it_asks_for_before_it_is_notified_is_not_sent(site, key):
    old = site.tasks.retry_at_once.delay(key, "old")
    site.journal.wait(key)

    new = site.tasks.retry_at_once.delay(key, "new")
    site.journal.open(key)

    assert new.get(timeout=30) == "new"
    with pytest.raises(TaskRevokedError):
        old.get(timeout=30)
    site.wait_free(key)
    assert begun(site, key) == ["old", "new"]


def test_with_tell_it_sees_it_and_has_its_result(site, key):
    old = site.tasks.look.delay(key, "old")
    site.journal.wait(key)

    new = site.tasks.look.delay(key, "new")

    assert old.get(timeout=30) == "saw it"
    assert new.get(timeout=30) == "new"


def test_it_does_not_come_again_if_its_process_is_killed_then(site, key):
    old = site.tasks.stay_whatever_comes.delay(key, "old", key)
    site.journal.wait(key)
    new = site.tasks.stay_whatever_comes.delay(key, "new", key)
    (pid,) = site.journal.wait(f"{key}:pid")

    os.kill(pid, signal.SIGKILL)

    assert new.get(timeout=60) == "new"
    with pytest.raises(TaskRevokedError, match="recalled"):
        old.get(timeout=60)
    assert begun(site, key) == ["old", "new"]


def test_with_a_result_a_member_of_a_chord_is_superseded_and_the_chord_completes(site, key):
    task = site.tasks.preview_with_result
    result = chord([task.s(key, "old", 60.0)])(site.tasks.total.s())
    site.journal.wait(key)

    new = task.delay(key, "new", 0.0)

    assert new.get(timeout=30) == "new"
    assert result.get(timeout=30) == ["superseded"]


def test_with_a_result_the_outermost_of_calls_of_itself_has_it(site, key):
    old = site.tasks.call_itself.delay(key, "old")
    site.journal.wait(key)

    new = site.tasks.call_itself.delay(key, "new")

    assert new.get(timeout=30) == "new"
    assert old.get(timeout=30) == "superseded"


def test_without_one_a_member_of_a_chord_runs_to_its_end(site, key):
    result = chord([site.tasks.preview.s(key, "old", 3.0)])(site.tasks.total.s())
    site.journal.wait(key)

    new = site.tasks.preview.delay(key, "new", 0.0)

    assert result.get(timeout=30) == ["old"]
    assert new.get(timeout=30) == "new"
    assert "asked" not in [what for what, *_ in site.journal.read(key)]
