"""The key of a process that is gone is free at once, and never before the process is gone."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from celery.exceptions import TimeLimitExceeded, WorkerLostError

from tests import processes
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

OPTIONS = {"late": False, "visibility": 3600}
SOON = 30.0  # seconds; about one in practice, while the lease is sixty


class Death(threading.Thread):
    """Waits for a process's end; `at` is when it was seen to be gone."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self.at = 0.0
        self.start()

    def run(self) -> None:
        wait_until(lambda: not processes.alive(self._pid), timeout=60.0, poll=0.005)
        self.at = time.monotonic()

    def wait(self) -> float:
        self.join(60.0)
        assert self.at, "it lives"
        return self.at


def begin(scene, task, key, how):
    """Let *task* begin on *key*, park another one behind it, and return its process."""
    result = task.delay(key, how)
    (first,) = scene.wait_begun(key)
    other = scene.tasks.work.delay(key, "next")
    scene.wait_queued(key, 1)
    return result, other, first["pid"]


def check_next(scene, key, other, death) -> None:
    """The next one came soon after the process was gone, and not before."""
    assert other.get(timeout=60) == "next"
    gone = death.wait()
    notes = [note for note in scene.journal.read(key) if note["name"] == "next"]
    assert notes[0]["others"] == []
    assert notes[0]["at"] - gone < SOON


@pytest.fixture(autouse=True)
def _disarmed(scene):
    yield
    scene.arm("")


WAYS = ["sleep", "regex", "sum"]


@pytest.mark.parametrize("how", WAYS)
def test_a_process_that_is_killed(scene, key, how):
    result, other, pid = begin(scene, scene.tasks.hold_early, key, how)
    death = Death(pid)

    os.kill(pid, signal.SIGKILL)

    check_next(scene, key, other, death)
    with pytest.raises(WorkerLostError):
        result.get(timeout=30)


@pytest.mark.parametrize("how", WAYS)
def test_a_task_over_its_hard_time_limit(scene, key, how):
    with scene.lock(key):  # both are parked before the limit counts
        result = scene.tasks.hold_limited.delay(key, how)
        scene.wait_queued(key, 1)
        other = scene.tasks.work.delay(key, "next")
        scene.wait_queued(key, 2)
    death = Death(scene.wait_begun(key)[0]["pid"])

    check_next(scene, key, other, death)
    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=30)


@pytest.mark.parametrize("how", WAYS)
def test_a_task_that_is_revoked_and_killed(scene, key, how):
    result, other, pid = begin(scene, scene.tasks.hold_early, key, how)
    death = Death(pid)

    result.revoke(terminate=True, signal="KILL")

    check_next(scene, key, other, death)
    wait_until(lambda: result.state == "REVOKED", what="the task to be revoked")


@pytest.mark.parametrize("how", ["sleep", "regex"])
def test_a_task_that_is_revoked_and_terminated(scene, key, how):
    result, other, pid = begin(scene, scene.tasks.hold_early, key, how)
    death = Death(pid)

    result.revoke(terminate=True)

    check_next(scene, key, other, death)
    wait_until(lambda: result.state == "REVOKED", what="the task to be revoked")


def test_a_terminated_task_that_does_not_hear_of_it_keeps_its_key_until_it_is_gone(scene, key):
    result, other, pid = begin(scene, scene.tasks.hold_early, key, "sum")
    death = Death(pid)

    result.revoke(terminate=True)
    wait_until(lambda: result.state == "REVOKED", what="the task to be revoked")
    token = scene.look(key).token
    with pytest.raises(AssertionError):
        scene.wait_begun(key, 2, timeout=1.0)
    assert processes.alive(pid)
    assert scene.look(key).token == token

    os.kill(pid, signal.SIGKILL)
    check_next(scene, key, other, death)


@pytest.mark.parametrize("how", WAYS)
def test_with_reject_on_worker_lost_the_killed_task_runs_again(scene, key, how):
    result, other, pid = begin(scene, scene.tasks.hold_late, key, how)
    death = Death(pid)

    os.kill(pid, signal.SIGKILL)

    check_next(scene, key, other, death)
    assert result.get(timeout=60) == "again"
    names = [note["name"] for note in scene.begun(key)]
    assert sorted(names) == sorted([how, how, "next"])
    assert all(note["others"] == [] for note in scene.begun(key))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", ["acquire", "release"])
def test_a_task_that_is_terminated_while_it_takes_its_key_or_gives_it_up(scene, key, place, when):
    scene.arm(f"child:{place}:{when}:1", signal.SIGTERM)
    result = scene.tasks.hold_shortly.delay(key)
    wait_until(result.ready, timeout=60.0, what="the task's end")
    scene.wait_whole()

    assert scene.tasks.work.delay(key, "next").get(timeout=SOON) == "next"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_task_whose_result_could_not_be_stored_any_more_runs_again(scene, key, signum):
    scene.arm("child:success:before:1", signum)

    result = scene.tasks.hold_late_and_briefly.delay(key, "not at all")

    assert result.get(timeout=60) == "again"
    assert len(scene.begun(key)) == 2


def test_a_process_that_a_task_has_forked_keeps_its_key_while_it_lives(scene, key):
    other = f"{key}-other"
    pid = scene.tasks.fork_a_holder.delay(key, other).get(timeout=30)
    try:
        owner = scene.look(other).owner
        assert owner.split("|")[1] == str(pid)
        with pytest.raises(AssertionError):
            wait_until(lambda: scene.look(other).owner != owner, timeout=1.5)

        scene.journal.open(other)
        scene.journal.wait(other, 2)
        wait_until(lambda: not scene.look(other).token, what="the key to be free")
    finally:
        if processes.alive(pid):
            os.kill(pid, signal.SIGKILL)
