"""Processes die, and messages come twice; keys come free, and no task runs too often."""

from __future__ import annotations

import json
import os
import signal

import pytest
import redis

from tests.waiting import wait_until

SHARED = True
pytestmark = pytest.mark.faults


# A message that comes a second time


def message_of(site, task_id: str) -> str:
    """The message of a task that runs and is not acknowledged, as the broker keeps it."""

    def find() -> str | None:
        with redis.Redis.from_url(site.app.conf.broker_url) as client:
            name = f"{site.env['DISTLOCK_TEST_PREFIX']}:broker:unacked"
            for kept in client.hvals(name):
                if task_id in kept.decode():
                    return json.loads(kept)
        return None

    return wait_until(find, what=f"the message of {task_id}")


def deliver_again(site, message) -> None:
    """Do what the broker does when the visibility timeout is over."""
    payload, exchange, routing_key = message
    with site.app.connection_for_write() as connection:
        channel = connection.default_channel
        channel._do_restore_message(payload, exchange, routing_key, channel.client)


def test_a_second_delivery_waits_for_the_first_and_is_dropped(site, key):
    result = site.tasks.work_late.delay(key, key)
    site.journal.wait(key)

    deliver_again(site, message_of(site, result.id))
    site.wait_queued(key)
    assert result.state != "PARKED"
    site.journal.open(key)

    assert result.get(timeout=30) == "done"
    site.wait_queued(key, 0)
    site.tasks.work_requeue.delay(key, "next").get(timeout=30)
    assert site.journal.read(key) == [result.id, "next"]


def test_a_second_delivery_runs_if_the_first_has_lost_its_lock(site, key):
    result = site.tasks.work_late.delay(key, key)
    site.journal.wait(key)
    deliver_again(site, message_of(site, result.id))
    site.wait_queued(key)

    site.forget(key)
    site.journal.wait(key, 2)
    aborted = f"work_late[{result.id}] raised unexpected: LockLostError"
    wait_until(lambda: aborted in site.log(), what="the first to be aborted")
    site.journal.open(key)

    again = site.app.AsyncResult  # one object remembers the first end
    wait_until(lambda: again(result.id).state == "SUCCESS", what="the second to end")
    assert site.journal.read(key) == [result.id] * 2


def test_a_second_delivery_that_comes_late_is_dropped(site, key):
    result = site.tasks.work_late.delay(key, key)
    message = message_of(site, result.id)
    site.journal.open(key)
    result.get(timeout=30)
    site.wait_settled(key, result.id)

    deliver_again(site, message)
    wait_until(
        lambda: f"work_late[{result.id}] dropped: a second delivery" in site.log(),
        what="the second delivery to be dropped",
    )

    assert site.journal.read(key) == [result.id]
    assert result.state == "SUCCESS"


def test_a_second_delivery_runs_if_the_first_has_died(site, key):
    result = site.tasks.work_late.delay(key, key)
    site.journal.wait(key)
    deliver_again(site, message_of(site, result.id))
    site.wait_queued(key)

    os.kill(int(site.look(key).owner.split("|")[1]), signal.SIGKILL)

    site.journal.wait(key, 2)
    site.journal.open(key)
    # Before that, Celery may say that the first one's process was lost, and a result keeps an end.
    again = site.app.AsyncResult
    wait_until(lambda: again(result.id).state == "SUCCESS", what="the second delivery's success")
    assert site.journal.read(key) == [result.id, result.id]


# A pool process that dies


@pytest.mark.parametrize("parked", [False, True])
def test_a_task_whose_process_is_killed_runs_once_more(site, key, parked):
    if parked:
        with site.held(key):
            result = site.tasks.kill_itself_once.delay(key)
            site.wait_queued(key)
    else:
        result = site.tasks.kill_itself_once.delay(key)

    assert result.get(timeout=60) == "survived"
    site.tasks.work_requeue.delay(key, "next").get(timeout=30)
    assert site.journal.read(key) == [None, None, "next"]


@pytest.mark.parametrize("how", ["kill", "exit", "limit", "terminate"])
def test_the_key_of_a_process_that_ended_is_free_long_before_the_lease_ends(site, key, how):
    if how == "limit":
        result = site.tasks.die_by_limit.delay(key, how)
    else:
        result = site.tasks.die.delay(key, how)
    (pid,) = site.journal.wait(key)
    other = site.tasks.work_requeue.delay(key, "other")

    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    elif how == "terminate":
        result.revoke(terminate=True)

    assert other.get(timeout=30) == 0


# A worker that vanishes


@pytest.fixture
def pair(load_app, worker, bare_site, celery_env):
    """Two workers of the test's own, and the site that they are."""
    tasks = load_app("tests.apps.locked")
    own = type(bare_site)(tasks, celery_env)
    own.workers = [worker("tests.apps.locked", concurrency=2, wait=False) for _ in range(2)]
    for each in own.workers:
        each.wait_ready()
    yield own
    for each in own.workers:
        if each.running:
            each.process.terminate()  # both, before `worker` waits for the first
    tasks.journal.close()


def worker_of(pair, pid: int):
    return next(each for each in pair.workers if pid in each.children())


def test_parked_tasks_run_elsewhere_when_the_holders_worker_vanishes(pair, key):
    pair.tasks.work_late.delay(key, key)
    pair.journal.wait(key)
    parked = [pair.tasks.work_requeue.delay(key, number) for number in range(6)]
    pair.wait_queued(key, 6)

    worker_of(pair, int(pair.look(key).owner.split("|")[1])).kill(whole=True)

    for result in parked:
        assert result.get(timeout=60) == 0
    assert sorted(pair.journal.read(key)[1:]) == [0, 1, 2, 3, 4, 5]


def test_a_suspended_worker_loses_its_key_and_notices(pair, key):
    result = pair.tasks.catch_loss.delay(key)
    (token,) = pair.journal.wait(key)
    stopped = worker_of(pair, int(pair.look(key).owner.split("|")[1]))

    stopped.pause()
    with pair.lock(key) as lease:  # as soon as the lease has ended
        assert lease.token > token
        stopped.resume()
        caught = result.get(timeout=30)

        assert caught == {"key": key, "token": token, "held": False}
        assert pair.look(key).token == lease.token


def test_a_worker_that_is_stopped_warm_leaves_nothing_locked_or_lost(pair, key):
    running = pair.tasks.work_requeue.delay(key, "running", key)
    pair.journal.wait(key)
    parked = [pair.tasks.work_requeue.delay(key, number) for number in range(4)]
    pair.wait_queued(key, 4)

    pair.workers[0].process.terminate()
    pair.journal.open(key)
    for result in [running, *parked]:
        assert result.get(timeout=60) == 0

    assert sorted(pair.journal.read(key)[1:]) == [0, 1, 2, 3]
