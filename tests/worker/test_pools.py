"""The pools besides a prefork one that forks: spawned processes, threads, greenlets."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from celery import VERSION

from celery_distlock.errors import LockLostError
from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

POOLS = {"solo": 1, "threads": 4, "gevent": 20, "eventlet": 20, "spawn": 2}


@pytest.fixture(scope="module", params=POOLS)
def pool(request) -> str:
    # Not imported here: eventlet warns of every fork from then on, in other tests, too.
    if request.param in ("gevent", "eventlet") and find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    if request.param == "spawn" and VERSION < (5, 7):
        pytest.skip("the prefork pool of this Celery forks")
    return request.param


@pytest.fixture(scope="module")
def site(pool, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    """Two workers of each pool."""
    worker = {"pool": pool, "concurrency": POOLS[pool]}
    if pool == "spawn":
        worker |= {"pool": "prefork", "args": ["--pool-start-method", "spawn"]}
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [worker, worker]) as site:
        yield site


def test_100_tasks_over_3_keys_neither_overlap_nor_get_lost(site, key):
    keys = [f"{key}:{number}" for number in range(3)]

    results = [site.tasks.count.delay(keys[number % 3]) for number in range(100)]
    for result in results:
        result.get(timeout=90)

    assert [site.journal.read(f"{each}:overlaps") for each in keys] == [[], [], []]
    assert [site.journal.get(each) for each in keys] == [34, 33, 33]
    tokens = [site.journal.read(f"{each}:tokens") for each in keys]
    assert tokens == [sorted(set(each)) for each in tokens]


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_parked_tasks_run_in_the_order_in_which_they_came(site, key, way):
    with site.held(key):
        results = []
        for number in range(5):
            results.append(site.tasks.work_requeue.delay(key, number))
            site.wait_queued(key, number + 1)
        if way == "broker":
            site.forget_channel(key)

    assert [result.get(timeout=30) for result in results] == [0] * 5
    assert site.journal.read(key) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_a_woken_task_is_pushed_to_the_worker_that_parked_it(site, key, way):
    for attempt in range(3):
        keys = [f"{key}:{attempt}:{number}" for number in range(4)]
        with ExitStack() as held:
            results = []
            for each in keys:
                held.enter_context(site.held(each))
                results.append(site.tasks.report_way.delay(each))
                site.wait_queued(each)
                if way == "broker":
                    site.forget_channel(each)
        answers = [result.get(timeout=30) for result in results]
        if way == "broker" or any(each["pushed"] for each in answers):
            break

    # A worker that is slow to take one may get it by the broker after all; not all of them, again
    # and again.
    assert any(each["pushed"] for each in answers) == (way == "channel")
    for result, each in zip(results, answers, strict=True):
        if each["pushed"]:
            (worker,) = (worker for worker in site.workers if worker.name == each["worker"])
            assert f"report_way[{result.id}] parked" in worker.log()


def test_wait_gets_the_key_when_it_is_free(site, key):
    with site.held(key):
        result = site.tasks.work_wait.delay(key)
        site.wait_queued(key)

    assert result.get(timeout=30) == 0


def test_tasks_that_wait_for_one_another_all_run(site, key):
    results = [site.tasks.square_wait.delay(key, number) for number in range(10)]

    assert [result.get(timeout=60) for result in results] == [n * n for n in range(10)]
    assert site.journal.read(f"{key}:overlaps") == []


def test_a_task_that_loses_its_lock_is_aborted(site, pool, key):
    # A thread that sleeps learns of it when it wakes.
    names = ["turn_long"] if pool == "threads" else ["turn_long", "sleep_long"]
    for name in names:
        result = getattr(site.tasks, name).delay(f"{key}:{name}")
        (token,) = site.journal.wait(f"{key}:{name}")

        site.forget(f"{key}:{name}")
        with pytest.raises(LockLostError) as caught:
            result.get(timeout=20 * site.tasks.LEASE)

        assert result.state == "FAILURE"
        assert (caught.value.key, caught.value.token) == (f"{key}:{name}", token)
        assert site.tasks.work_fail.delay(f"{key}:{name}").get(timeout=30) == 0


def test_the_key_of_a_task_that_failed_is_free(site, key):
    result = site.tasks.end.delay(key, "exception")
    with pytest.raises(ValueError, match="exception"):
        result.get(timeout=30)

    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_a_failed_task_lets_the_next_run(site, key):
    with site.held(key):
        failing = site.tasks.end.delay(key, "exception")
        site.wait_queued(key, 1)
        other = site.tasks.work_requeue.delay(key)
        site.wait_queued(key, 2)

    assert other.get(timeout=30) == 0
    assert failing.get(timeout=30, propagate=False).args == ("exception",)


def test_a_lease_is_renewed_while_the_task_runs(site, key):
    result = site.tasks.work_requeue.delay(key, None, key)
    site.journal.wait(key)
    token = site.look(key).token
    lease = site.tasks.LEASE
    for _ in range(4):
        wait_until(lambda: site.look(key).remaining < 0.8 * lease, what="the lease to run out")
        wait_until(lambda: site.look(key).remaining > 0.9 * lease, what="a renewal")

    assert site.look(key).token == token
    site.journal.open(key)
    assert result.get(timeout=30) == 0
