"""The fixtures themselves: what every other test relies on."""

from __future__ import annotations

import os
import signal

import pytest
import redis

from tests import processes, servers
from tests.waiting import wait_until


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_worker_runs_a_task_in_each_pool(load_app, worker, pool):
    basic = load_app("tests.apps.basic")
    process = worker(pool=pool)

    assert basic.add.delay(2, 3).get(timeout=30) == 5

    assert process.stop() == 0
    assert not processes.session(process.pid)


def test_tasks_run_in_the_children_of_a_prefork_worker(load_app, worker):
    basic = load_app("tests.apps.basic")
    process = worker(pool="prefork", concurrency=2)

    children = process.children()

    assert len(children) == 2
    assert basic.pid.delay().get(timeout=30) in children


def test_a_worker_that_cannot_start_fails_with_its_log(worker):
    with pytest.raises(AssertionError, match="no_such_app"):
        worker("tests.apps.no_such_app")


def test_a_killed_worker_leaves_nothing_behind_after_stop(worker):
    process = worker(pool="prefork", concurrency=2)

    process.kill()
    assert process.stop() == -signal.SIGKILL

    assert not processes.session(process.pid)


def test_a_paused_worker_runs_nothing_until_it_is_resumed(load_app, worker):
    basic = load_app("tests.apps.basic")
    process = worker()
    process.pause()

    result = basic.add.delay(2, 3)

    assert {each.state for each in processes.session(process.pid)} == {"T"}
    assert result.state == "PENDING"
    process.resume()
    assert result.get(timeout=30) == 5


def test_a_busy_worker_is_stopped_by_force(load_app, worker):
    basic = load_app("tests.apps.basic")
    process = worker()
    basic.sleep.delay(300)
    process.wait_log("received")

    process.stop(warm=0.1, cold=10.0)

    assert not processes.session(process.pid)


def test_all_keys_of_a_test_begin_with_its_prefix(load_app, worker, redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        before = set(client.scan_iter())
        basic = load_app("tests.apps.basic")
        worker()
        basic.add.delay(2, 3).get(timeout=30)
        basic.add.apply_async((2, 3), queue="elsewhere")

        new = set(client.scan_iter()) - before

    # Workers that other modules share are on this server, too, with prefixes of their own.
    assert any(key.startswith(prefix.encode()) for key in new)
    assert [key for key in new if not key.startswith(b"test-")] == []


def test_only_the_keys_of_a_prefix_are_deleted(redis_url, prefix):
    with redis.Redis.from_url(redis_url) as client:
        client.mset({f"{prefix}:a*:1": 1, f"{prefix}:ab:1": 1})

        servers.delete_keys(redis_url, f"{prefix}:a*")

        assert list(servers.keys(redis_url, prefix)) == [f"{prefix}:ab:1".encode()]


def test_a_failed_wait_says_for_what():
    with pytest.raises(AssertionError, match=r"waited 0.05 s for a miracle; .* None"):
        wait_until(lambda: None, timeout=0.05, what="a miracle")


def test_this_process_is_alive_and_its_children_are_found():
    assert processes.alive(os.getpid())
    assert os.getpid() in processes.children(os.getppid())
