"""Workers are stopped in every way; what waits runs elsewhere, and no key stays behind."""

from __future__ import annotations

import os
import signal

import pytest

from celery_distlock.testing import EmbeddedServer
from tests.faults.crashes.conftest import Scene, make_scene
from tests.waiting import wait_until

pytestmark = pytest.mark.faults

SOON = 30.0  # seconds; less than one in practice, while the lease would be sixty
PARKED = 3

LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@pytest.fixture
def stage(redis_server: EmbeddedServer, tmp_path):
    """Makes a scene of a test's own: takes the app's options, and how many workers there are."""
    scenes = []

    def make(workers: int = 2, **options) -> Scene:
        # No message comes back by itself in the time of a test.
        options = {"visibility": 3600, "at_receipt": False, "lease": 60.0, **options}
        scenes.append(make_scene(redis_server.url, tmp_path, options, workers))
        scene = next(scenes[-1])
        made.append(scene)
        return scene

    made: list[Scene] = []
    yield make
    for scene in made:
        print(scene.log())  # noqa: T201
    for each in reversed(scenes):
        next(each, None)


def hold_and_park(scene, key):
    """Let a task hold *key* until its gate is open, park others, and return all and the worker."""
    holder = scene.tasks.work.delay(key, "holder", key)
    (first,) = scene.wait_begun(key)
    parked = [scene.tasks.work.delay(key, number) for number in range(PARKED)]
    scene.wait_queued(key, PARKED)
    return holder, parked, scene.worker_of(first["pid"])


def stop(worker, signum) -> None:
    worker.process.send_signal(signum)


def wait_end(worker) -> None:
    """Wait for its main process's end."""
    wait_until(lambda: not worker.running, timeout=60.0, what=f"the end of {worker!r}")


def check(scene, key, stopped, expected) -> None:
    """Those that were parked ran once each, alone, and not in the worker that was stopped."""
    wait_until(lambda: not scene.left(key), what="nothing to be left")
    begun = scene.begun(key)
    assert [note["others"] for note in begun] == [[]] * len(begun)
    assert sorted(str(note["name"]) for note in begun) == sorted(map(str, expected))
    here = {pid for worker in scene.workers if worker is not stopped for pid in worker.children()}
    assert {note["pid"] for note in begun if note["name"] != "holder"} <= here


@LATE
def test_warm(stage, key, late):
    scene = stage(late=late)
    holder, parked, worker = hold_and_park(scene, key)

    stop(worker, signal.SIGTERM)
    wait_until(lambda: scene.channels() == 1, what="the channel to be closed")
    wait_until(lambda: not scene.consumes(worker), what="the last message to be asked for")
    scene.journal.open(key)

    assert holder.get(timeout=30) == "holder"
    assert [result.get(timeout=30) for result in parked] == list(range(PARKED))
    wait_end(worker)
    check(scene, key, worker, ["holder", *range(PARKED)])


def test_warm_and_the_process_is_killed(stage, key):
    scene = stage(workers=1)
    (worker,) = scene.workers
    scene.tasks.work.delay(key, "holder", key)
    (holder,) = scene.wait_begun(key)

    stop(worker, signal.SIGTERM)
    wait_until(lambda: scene.channels() == 0, what="the channel to be closed")
    wait_until(lambda: not scene.consumes(worker), what="the last message to be asked for")
    os.kill(holder["pid"], signal.SIGKILL)

    wait_until(lambda: not scene.look(key).owner, timeout=SOON, what="the key to be free")
    wait_end(worker)


@LATE
def test_soft_and_the_task_ends_in_time(stage, key, late):
    scene = stage(late=late, soft=4.0)
    holder, parked, worker = hold_and_park(scene, key)

    stop(worker, signal.SIGQUIT)
    worker.wait_log("Initiating Soft Shutdown")
    scene.journal.open(key)

    assert holder.get(timeout=30) == "holder"
    assert [result.get(timeout=30) for result in parked] == list(range(PARKED))
    wait_end(worker)
    wait_until(lambda: not scene.left(key), what="nothing to be left")
    begun = scene.begun(key)
    assert [note["others"] for note in begun] == [[]] * len(begun)
    assert sorted(map(str, (note["name"] for note in begun))) == sorted(["0", "1", "2", "holder"])


@pytest.mark.parametrize("soft", [0.0, 0.5], ids=["cold", "soft-over"])
@LATE
def test_cold(stage, key, late, soft):
    """With early acknowledgement Celery gives up the task that runs, and so do we."""
    scene = stage(late=late, soft=soft)
    holder, parked, worker = hold_and_park(scene, key)

    stop(worker, signal.SIGQUIT)
    scene.wait_begun(key, 2)
    notes = scene.journal.read(key)
    end = next(note for note in notes if note["what"] == "end")
    assert scene.begun(key)[1]["at"] - end["at"] < SOON
    scene.journal.open(key)

    assert [result.get(timeout=30) for result in parked] == list(range(PARKED))
    if late:
        assert holder.get(timeout=30) == "holder"
    wait_end(worker)
    check(scene, key, worker, ["holder"] * (1 + late) + list(range(PARKED)))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
@LATE
def test_what_was_pushed_and_not_begun_runs_elsewhere(stage, key, late, signum):
    scene = stage(workers=1, late=late)
    (worker,) = scene.workers
    with scene.lock(key):
        pushed = scene.tasks.work.delay(key, "pushed")
        scene.wait_queued(key, 1)
        busy = [f"{key}-{number}" for number in range(2)]
        for other in busy:
            scene.tasks.work.delay(other, "busy", other)
            scene.wait_begun(other)
    received = f"work[{pushed.id}] received"
    wait_until(lambda: worker.log().count(received) >= 2, what="the push to be taken")
    scene.let_pass(key, -600)  # it is not sent while this worker could still take it again

    scene.start(concurrency=4)  # with late acknowledgement the busy ones come here, too
    stop(worker, signum)
    wait_until(lambda: scene.channels() == 1, what="the channel to be closed")
    wait_until(lambda: not scene.consumes(worker), what="the last message to be asked for")
    scene.let_pass(key, 600)
    assert pushed.get(timeout=60) == "pushed"
    for other in busy:
        scene.journal.open(other)
    wait_end(worker)
    check(scene, key, worker, ["pushed"])
