"""A strict task is not passed, though its worker is killed between its dispatch and its begin."""

from __future__ import annotations

import time

import pytest

from celery_distlock.naming import PARKED
from tests.faults.crashes.conftest import make_scene
from tests.waiting import wait_until

TASKS = 6
WORKERS, SLOTS = 2, 4
OVERDUE = 6.0  # seconds after which the next one is dispatched, too, unless they are strict

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

PUSHED = (
    *("child:release:after:6", "main:take:before:2", "main:take:after:2"),
    "child:claim:before:3",
)
BY_BROKER = (
    *("child:release:after:6", "child:publish:before:2", "child:publish:after:2"),
    "child:claim:before:3",
)
POINTS = [("pushed", point) for point in PUSHED] + [("by broker", point) for point in BY_BROKER]


@pytest.fixture(scope="module")
def scene(request, redis_server, tmp_path_factory):
    """Two workers, to which woken tasks are pushed, or which get them from the broker."""
    folder = tmp_path_factory.mktemp("worker")
    yield from make_scene(redis_server.url, folder, {"channel": request.param == "pushed"}, WORKERS)


@pytest.mark.parametrize(("scene", "point"), POINTS, indirect=["scene"])
def test_a_strict_task_whose_worker_is_killed_is_not_passed(scene, key, point):
    before = len(scene.hits())
    scene.mend()
    with scene.lock(key, lease=60.0):
        results = [scene.tasks.work_strict.delay(key, number) for number in range(TASKS)]
        for slot in range(SLOTS):
            scene.tasks.work.delay(f"{key}-{slot}", slot, key)
            scene.wait_begun(f"{key}-{slot}")
        scene.arm(point)
    time.sleep(OVERDUE)  # no process is free for the first
    scene.journal.open(key)

    wait_until(lambda: len(scene.hits()) > before, timeout=60.0, what=point)
    for worker in scene.workers:
        worker.kill(whole=True)
    held = scene.look(key)
    has_begun = held.run.partition(":")[0] if not held.owner.startswith(PARKED) else ""
    had_begun = {note["id"] for note in scene.begun(key)}
    scene.mend()
    scene.let_pass(key, 120.0)  # the broker may have lost a message

    for number, result in enumerate(results):
        # One that had begun is delivered again for its result, unless that message was lost.
        assert result.id in had_begun or result.get(timeout=60) == number
    scene.arm("")
    begun = scene.begun(key)
    order = dict.fromkeys(note["id"] for note in begun if note["id"] != has_begun)
    assert list(order) == [result.id for result in results if result.id != has_begun]
    assert not any(note["others"] for note in begun)
