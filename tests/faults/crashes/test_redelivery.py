"""
The broker delivers a message a second time, as if the first delivery's worker were gone.

Sometimes it is. Where it is not, the second delivery waits for the first one, whatever the task's
policy is for others: it is the same task, and neither a conflict nor a reason to run twice.
"""

from __future__ import annotations

import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.faults

# Seconds: after three, a message that is not acknowledged comes again. For one, a worker that is
# paused still takes what comes to the queue: Redis answers the request that waits there.
OPTIONS = {"visibility": 3, "restore": 0.2}


@pytest.fixture(autouse=True)
def _whole_scene(scene):
    scene.mend()


def begin(scene, key, policy="requeue"):
    """Let a task run on *key*, up to its gate, and return it and its worker."""
    result = scene.tasks.BY_POLICY[policy].delay(key, "task", key)
    (first,) = scene.wait_begun(key)
    return result, scene.worker_of(first["pid"])


def check(scene, key, *expected) -> None:
    """The tasks *expected* began in this order, each alone, and nothing of them is left."""
    wait_until(lambda: not scene.left(key), timeout=60.0, what="nothing to be left")
    begun = scene.begun(key)
    assert [note["others"] for note in begun] == [[]] * len(begun)
    assert [note["name"] for note in begun] == list(expected)


# The visibility timeout


@pytest.mark.parametrize("policy", ["requeue", "retry", "skip", "fail", "wait"])
def test_what_comes_again_while_it_runs_waits_and_is_dropped(scene, key, policy):
    result, _ = begin(scene, key, policy)
    scene.wait_queued(key, 1)
    assert result.state == "PENDING"

    scene.journal.open(key)

    assert result.get(timeout=30) == "task"
    check(scene, key, "task")
    assert result.state == "SUCCESS"
    assert result.result == "task"


@pytest.mark.parametrize("policy", ["requeue", "wait"])
def test_what_comes_again_runs_when_the_firsts_worker_vanishes(scene, key, policy):
    result, worker = begin(scene, key, policy)
    scene.wait_queued(key, 1)

    worker.kill(whole=True)
    scene.mend(wait=False)
    scene.wait_begun(key, 2)
    scene.journal.open(key)

    assert result.get(timeout=30) == "task"
    check(scene, key, "task", "task")


def test_a_first_delivery_that_the_second_has_overtaken_is_dropped(scene, key):
    result = scene.tasks.work.apply_async((key, "task"), countdown=5.0)  # time to stall it
    received = f"[{result.id}] received"
    stalled = wait_until(lambda: next((w for w in scene.workers if received in w.log()), None))

    stalled.pause()
    try:
        assert result.get(timeout=30) == "task"
    finally:
        stalled.resume()

    # The other's result is there a moment before its end is noted.
    ways = [f"[{result.id}] {way}" for way in ("dropped: a second delivery", "deferred")]
    wait_until(lambda: any(way in stalled.log() for way in ways), what="it to be seen through")
    check(scene, key, "task")


# A lost connection


def test_a_lost_broker_connection_does_not_make_a_task_run_twice(scene, key):
    result, worker = begin(scene, key)

    scene.cut_off(worker)
    scene.wait_queued(key, 1)
    scene.journal.open(key)

    assert result.get(timeout=30) == "task"
    check(scene, key, "task")


def test_a_task_that_ends_while_its_worker_is_cut_off_does_not_run_twice(scene, key):
    result, worker = begin(scene, key)

    scene.cut_off(worker)
    scene.journal.open(key)

    assert result.get(timeout=30) == "task"
    received = f"work[{result.id}] received"
    wait_until(lambda: scene.log().count(received) > 1, what="the second delivery")
    check(scene, key, "task")


# The main process dies alone


def begin_with_others(scene, key, task):
    """Let *task* run on *key*, up to its gate, and park three others, and its second delivery."""
    result = task.delay(key, "task", key)
    (first,) = scene.wait_begun(key)
    others = [scene.tasks.work.delay(key, number) for number in range(3)]
    scene.wait_queued(key, 4)
    return scene.worker_of(first["pid"]), [result, *others]


def check_all(scene, key, results, *expected) -> None:
    """All have their results, and *expected* began, in whatever order, each alone."""
    assert [result.get(timeout=30) for result in results] == ["task", 0, 1, 2]
    wait_until(lambda: not scene.left(key), timeout=60.0, what="nothing to be left")
    begun = scene.begun(key)
    assert [note["others"] for note in begun] == [[]] * len(begun)
    assert sorted(str(note["name"]) for note in begun) == sorted(map(str, expected))


def test_all_run_elsewhere_if_the_pool_dies_with_its_worker(scene, key):
    worker, results = begin_with_others(scene, key, scene.tasks.work)

    worker.kill()
    scene.journal.open(key)

    check_all(scene, key, results, "task", 0, 1, 2, "task")


def test_a_process_that_outlives_its_worker_finishes_its_task_alone(scene, key):
    worker, results = begin_with_others(scene, key, scene.tasks.outlive_the_worker)
    token = scene.look(key).token

    worker.kill()
    with pytest.raises(AssertionError):
        scene.wait_begun(key, 2, timeout=1.5 * scene.tasks.LEASE)
    assert scene.look(key).token == token
    scene.journal.open(key)

    check_all(scene, key, results, "task", 0, 1, 2)


# The key of a task that retries


def test_a_retry_that_keeps_its_key_outlives_the_worker_that_had_it(scene, key):
    result = scene.tasks.retry_and_keep_the_key.delay(key, "task")
    received = f"{result.id}] received"
    scene.wait_begun(key)
    wait_until(lambda: scene.log().count(received) > 1, what="the retry to be received")
    others = [scene.tasks.work.delay(key, number) for number in range(3)]
    scene.wait_queued(key, 3)

    for worker in scene.workers:
        worker.kill(whole=True)
    scene.mend(wait=False)

    check_all(scene, key, [result, *others], "task", "task", 0, 1, 2)


# A message that is deleted


def test_what_was_woken_and_purged_from_the_broker_runs(scene, key):
    with scene.lock(key):
        result = scene.tasks.work.delay(key, "task")
        scene.wait_queued(key, 1)
        scene.close()
    wait_until(lambda: scene.left(key).get("messages") == 1, what="the message to be sent")
    scene.tasks.app.control.purge()
    assert not {"messages", "unacked"} & scene.left(key).keys()

    scene.let_pass(key, 60.0)
    scene.mend()

    assert result.get(timeout=30) == "task"
    check(scene, key, "task")
