"""
With early acknowledgement, Celery's default, a task ends with its process; the others do not.

What a death takes along is what Celery itself gives up: the message of a task that a pool process
has begun (to look for its key, too) is no longer with the broker. From the moment that it is parked
until it has its key, and that may be long, the lock store has it, and no process's death counts.
"""

from __future__ import annotations

import pytest
from celery.exceptions import WorkerLostError

from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(240)]

OPTIONS = {"late": False}
TASKS = 4


@pytest.fixture(autouse=True)
def _whole_scene(scene):
    scene.mend()
    yield
    scene.arm("")


def park(scene, key):
    return [scene.tasks.work.delay(key, number) for number in range(TASKS)]


def wait_ready(scene, results) -> None:
    def look() -> bool:
        scene.mend(wait=False)
        return all(result.ready() for result in results)

    wait_until(look, timeout=90.0, what=f"{len(results)} results")


def check_order(scene, key) -> list[int]:
    """No two ran at once; return which ran."""
    begun = scene.begun(key)
    assert [note["others"] for note in begun] == [[]] * len(begun)
    tokens = [note["token"] for note in begun]
    assert tokens == sorted(set(tokens))
    return sorted(note["name"] for note in begun)


def test_what_is_parked_outlives_all_workers(scene, key):
    with scene.lock(key):
        results = park(scene, key)
        scene.wait_queued(key, TASKS)
        for worker in scene.workers:
            worker.kill(whole=True)
    scene.mend()

    assert [result.get(timeout=60) for result in results] == list(range(TASKS))
    assert check_order(scene, key) == list(range(TASKS))


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_woken_and_has_not_its_key_outlives_the_worker_it_was_pushed_to(scene, key, when):
    with scene.lock(key):
        results = park(scene, key)
        scene.wait_queued(key, TASKS)
        scene.arm(f"main:take:{when}:1")
    wait_ready(scene, results)

    assert [result.get(timeout=10) for result in results] == list(range(TASKS))
    assert check_order(scene, key) == list(range(TASKS))


@pytest.mark.parametrize("point", ["release:before", "release:after"])
def test_the_death_of_the_waker_affects_no_other(scene, key, point):
    seen = len(scene.hits())
    with scene.lock(key):
        results = park(scene, key)
        scene.wait_queued(key, TASKS)
        scene.arm(f"child:{point}:1")
    wait_ready(scene, results)

    (hit,) = scene.hits()[seen:]
    waker = next(note["name"] for note in scene.begun(key) if note["pid"] in hit["victims"])
    for number, result in enumerate(results):
        got = result.get(timeout=10, propagate=False)
        assert got == number or (number == waker and isinstance(got, WorkerLostError))
    assert check_order(scene, key) == list(range(TASKS))


def test_the_death_of_one_that_looks_for_its_key_affects_no_other(scene, key):
    with scene.lock(key):
        scene.arm("child:acquire:before:1")
        results = park(scene, key)
        wait_until(lambda: sum(result.state == "FAILURE" for result in results) == 1)
        scene.wait_queued(key, TASKS - 1)
    wait_ready(scene, results)

    lost = [n for n, r in enumerate(results) if isinstance(r.result, WorkerLostError)]
    assert len(lost) == 1
    others = [number for number in range(TASKS) if number not in lost]
    assert [results[number].get(timeout=10) for number in others] == others
    assert check_order(scene, key) == others


def test_a_worker_that_dies_loses_at_most_what_its_processes_had_begun(scene, key):
    seen = len(scene.hits())
    with scene.lock(key):
        scene.arm("main:acknowledge:after:1")
        results = park(scene, key)
        wait_until(lambda: len(scene.hits()) > seen, what="a worker to die")
        scene.mend()

        def settled() -> bool:
            left = scene.left(key)
            return not {"messages", "unacked"} & left.keys()

        wait_until(settled, timeout=60.0, what="the broker to have nothing left")
        # Acknowledged is not parked: a process may still be at it.
        wait_until(lambda: scene.look(key).waiting >= TASKS - 2, what="the others to be parked")
        kept = scene.look(key).waiting
    wait_until(lambda: not scene.left(key), timeout=60.0, what="nothing to be left")

    ran = check_order(scene, key)
    assert len(ran) >= kept  # its processes outlive it for a moment, and may still park theirs
    assert [results[number].get(timeout=10) for number in ran] == ran
