"""Real workers over the stores that only lock: without scripts, Redlock, ZooKeeper."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from celery_distlock.errors import LockConflictError
from tests import servers, zookeeper_server
from tests.topologies import url_of_user
from tests.waiting import wait_until
from tests.zookeeper_server import ZooKeeperServer

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = "tests.apps.unparked"


@pytest.fixture(scope="module")
def zookeeper() -> Iterator[ZooKeeperServer]:
    if zookeeper_server.MISSING:
        reason = f"NO ZOOKEEPER: there is no {zookeeper_server.MISSING} here"
        required = os.environ.get("DISTLOCK_TEST_ZOOKEEPER") == "require"
        (pytest.fail if required else pytest.skip)(reason)
    with ZooKeeperServer() as server:
        yield server


@pytest.fixture(params=["no scripts", "redlock", "zookeeper"])
def place(request, redis_server, prefix) -> str:
    match request.param:
        case "no scripts":
            servers.skip_without("SET with IFEQ")
            url = url_of_user(redis_server, prefix, "secret", "~* &* +@all -@scripting")
            return f"{url}?scripts=off"
        case "redlock":
            return str(request.getfixturevalue("shared_masters").url)
        case _:
            return str(request.getfixturevalue("zookeeper").url)


@pytest.fixture
def tasks(place, redis_url, load_app, monkeypatch):
    monkeypatch.setenv("DISTLOCK_TEST_STORE", place)
    return load_app(APP)


def test_tasks_neither_overlap_nor_get_lost(tasks, worker):
    for process in [worker(APP, concurrency=2, wait=False) for _ in range(2)]:
        process.wait_ready()
    kinds = [tasks.count_retry, tasks.count_wait, tasks.count_late]
    keys = [f"key{n}" for n in range(3)]

    results = [kind.delay(key) for _ in range(5) for key in keys for kind in kinds]

    for result in results:
        result.get(timeout=90)
    for key in keys:
        assert tasks.journal.get(key) == 15
        assert not tasks.journal.read(f"{key}:overlaps")
        tokens = tasks.journal.read(f"{key}:tokens")
        assert tokens == sorted(set(tokens))


def test_a_conflict_fails_or_is_skipped(tasks, worker):
    worker(APP, concurrency=2)
    first = tasks.fail.delay("key", "gate")
    tasks.journal.wait("key")

    with pytest.raises(LockConflictError):
        tasks.fail.delay("key", "gate").get(timeout=30)
    assert tasks.skip.delay("key").get(timeout=30) is None

    tasks.journal.open("gate")
    first.get(timeout=30)
    assert tasks.skip.delay("key").get(timeout=30) == "ran"


@pytest.mark.parametrize("name", ["gated_retry", "gated_skip"])
def test_a_second_delivery_comes_again_until_the_first_has_ended(tasks, worker, name):
    process = worker(APP, concurrency=2)
    task = getattr(tasks, name)
    first = task.delay("key", "gate")
    tasks.journal.wait("key")

    task.apply_async(("key", "gate"), task_id=first.id)  # as a broker that delivers it once more
    logged = f"{name}[{first.id}]"
    wait_until(lambda: f"{logged} deferred" in process.log(), what="the second to be deferred")
    tasks.journal.open("gate")

    dropped = f"{logged} dropped: a second delivery"
    wait_until(lambda: dropped in process.log(), timeout=60, what="the second to be dropped")
    assert first.get(timeout=30) == "done"
    assert tasks.journal.read("key") == [first.id]
    assert "StoreError" not in process.log()


def test_a_second_delivery_runs_when_the_firsts_process_is_killed(tasks, worker):
    process = worker(APP, concurrency=2)
    first = tasks.gated_skip.delay("key", "gate")
    tasks.journal.wait("key")
    tasks.gated_skip.apply_async(("key", "gate"), task_id=first.id)
    logged = f"gated_skip[{first.id}]"
    wait_until(lambda: f"{logged} ignored" in process.log(), what="the second to be sent again")

    for child in process.children():
        os.kill(child, signal.SIGKILL)

    tasks.journal.wait("key", 2)
    tasks.journal.open("gate")
    again = tasks.app.AsyncResult  # one object remembers the first end
    wait_until(lambda: again(first.id).state == "SUCCESS", timeout=60, what="the second's success")
    assert tasks.journal.read("key") == [first.id] * 2


def test_what_needs_to_park_is_refused_when_the_worker_starts(tasks, worker, monkeypatch):
    monkeypatch.setenv("DISTLOCK_TEST_PARK", "1")

    process = worker(APP, wait=False)

    assert process.process.wait(60) != 0
    log = process.log()
    assert "needs a store that can keep tasks until the key is free" in log
    assert "lock_on_conflict='retry' needs none" in log
