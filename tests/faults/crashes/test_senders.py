"""
A process is killed wherever it touches the outside world while it sends tasks through the store.

What was accepted runs, once, in the order of the calls; of the call that it was at when
it died it may be either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from celery_distlock.testing import die_with_parent
from tests.faults.crashes.test_points import ALL, by_channel, every
from tests.waiting import wait_until
from tests.workers import ROOT

if TYPE_CHECKING:
    from tests.faults.crashes.conftest import Scene

TASKS = 6
CROSSED = {"client:send": TASKS, "client:start": 1}  # and now and then, by a thread, "mark_sent"
FEW = [
    "client:send:before:3",
    "client:send:after:1",
    "client:send:after:4",
    "client:start:before:1",
    "client:start:after:1",
]

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]
__all__ = ["by_channel"]


def send(scene: Scene, key: str, *how: str) -> list[int]:
    """Send the tasks from a process of its own; return which of them were accepted."""
    ran = subprocess.run(
        die_with_parent([sys.executable, "-m", "tests.apps.sender", key, str(TASKS), *how]),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **scene.env, "DISTLOCK_TEST_ROLE": "client"},
        timeout=90,
        check=False,
    )
    return list(map(int, ran.stdout.split()))


def play(scene: Scene, key: str, points: str = "") -> list[int]:
    scene.mend()
    scene.arm(points)
    hits = len(scene.hits())

    accepted = send(scene, key)

    assert [hit["point"] for hit in scene.hits()[hits:]] == ([points] if points else [])
    wait_until(
        lambda: {note["name"] for note in scene.begun(key)} >= set(accepted),
        timeout=60.0,
        what="what was accepted to run",
    )
    wait_until(lambda: not scene.left(key), timeout=60.0, what="nothing to be left")
    ran = [note["name"] for note in scene.begun(key)]
    assert ran == list(range(len(ran)))
    assert len(ran) - len(accepted) in (0, 1)
    return accepted


def test_these_are_the_crossings_of_a_sender(by_channel, key):
    accepted = play(by_channel, key)

    crossed = by_channel.crossings()
    assert accepted == list(range(TASKS))
    assert crossed["client:send:after"] == TASKS
    assert crossed["client:start:after"] >= 1
    ours = {point.rpartition(":")[0] for point in crossed if point.startswith("client:")}
    ours = {point for point in ours if not point.endswith((":load", ":mark_sent"))}
    assert ours == set(CROSSED)


@pytest.mark.parametrize("point", every(CROSSED) if ALL else FEW)
def test_a_call_that_was_accepted_runs_though_its_process_dies(by_channel, key, point):
    play(by_channel, key, point)


# Each of a kind of which there is one at a time

ONCE = {**CROSSED, "client:identity": TASKS}
FEW_ONCE = ["client:identity:after:2", "client:send:before:2", "client:send:after:2"]


@pytest.mark.parametrize("point", every(ONCE) if ALL else [*FEW_ONCE, "client:start:before:1"])
def test_a_sender_that_dies_leaves_no_identity(by_channel, key, point):
    by_channel.mend()
    by_channel.arm(point)
    hits = len(by_channel.hits())

    accepted = send(by_channel, key, "once")

    assert [hit["point"] for hit in by_channel.hits()[hits:]] == [point]
    wait_until(
        lambda: {note["name"] for note in by_channel.begun(key)} >= set(accepted),
        timeout=60.0,
        what="what was accepted to run",
    )
    wait_until(lambda: not by_channel.left(key), timeout=60.0, what="nothing to be left")
    results = [by_channel.tasks.work_once.delay(key, number) for number in range(TASKS)]
    assert not any(result.joined for result in results)
    assert [result.get(timeout=60) for result in results] == list(range(TASKS))
