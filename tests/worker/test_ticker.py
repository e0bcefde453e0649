"""
What time lets in starts when it does: one of the workers is the ticker, and another one follows it.

No sweep comes to help: the interval between two is longer than these tests take.
"""

from __future__ import annotations

import itertools
import signal
import time
from typing import TYPE_CHECKING

import pytest

from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Limit
from tests.waiting import wait_until

if TYPE_CHECKING:
    from celery.result import AsyncResult

    from tests.worker.conftest import Site
    from tests.workers import WorkerProcess

APP = "tests.apps.shares"
ENV = {"DISTLOCK_TEST_SWEEP": "600"}
WORKERS = [{"concurrency": 2}, {"concurrency": 2}]
SOON = 1.5  # seconds, on a busy machine; a sweep would take minutes


@pytest.fixture(autouse=True)
def _both_run(site: Site) -> None:
    for worker in site.workers:
        if not worker.running:
            worker.start()


def store_of(site: Site) -> QueueStore:
    assert isinstance(site.store, QueueStore)
    return site.store


def ticker_of(site: Site) -> int:
    """Return the process id of the ticker, as soon as there is one."""
    process = wait_until(lambda: store_of(site).timetable.dues().ticker, what="a ticker")
    return int(process.partition("@")[0])


def begun(site: Site, key: str) -> float:
    """Return when the task began that waits at the gate of that name."""
    site.journal.wait(f"begun:{key}")
    now = time.monotonic()
    site.journal.open(key)
    return now


def occupy(worker: WorkerProcess, site: Site, key: str) -> list[AsyncResult]:
    """Send tasks that wait at the gate *key*, one after the other, until *worker* has one."""
    results: list[AsyncResult] = []
    while not (results and f"use[{results[-1].id}] received" in worker.log()):
        results.append(site.tasks.use.delay(f"{key}:{len(results)}", gate=key))
        received = f"use[{results[-1].id}] received"
        wait_until(lambda: received in site.log(), what="the task to be received")  # noqa: B023
    site.journal.wait(f"begun:{key}")
    return results


def test_a_parked_task_starts_when_its_key_has_rested(site: Site, key: str) -> None:
    results = [site.tasks.call_api.delay(key) for _ in range(4)]

    for result in results:
        result.get(timeout=60)

    times = [when for when, _ in site.journal.wait(f"{key}:calls", 4)]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert min(gaps) >= 1.5
    assert max(gaps) < 1.5 + SOON


def test_a_parked_task_starts_when_its_key_has_cooled_down(site: Site, key: str) -> None:
    site.tasks.cool_down.delay(key, 2.0).get(timeout=30)
    (cooled,) = site.journal.read(f"{key}:cooled")
    result = site.tasks.use.delay(key, gate=key)

    assert 1.9 <= begun(site, key) - cooled < 2.0 + SOON
    result.get(timeout=30)


def test_a_parked_task_starts_when_an_operators_limit_ends(site: Site, key: str) -> None:
    site.store.units.set_limit(key, Limit(0, time.time() + 2.0))  # type: ignore[attr-defined]
    paused = time.monotonic()
    result = site.tasks.use.delay(key, gate=key)
    site.wait_queued(key)

    assert begun(site, key) - paused < 2.0 + SOON
    result.get(timeout=30)


def test_one_of_the_workers_is_the_ticker(site: Site) -> None:
    assert ticker_of(site) in {worker.pid for worker in site.workers}


def test_another_worker_follows_a_ticker_that_is_killed(site: Site, key: str) -> None:
    pid = ticker_of(site)
    (worker,) = (each for each in site.workers if each.pid == pid)
    worker.process.send_signal(signal.SIGKILL)
    killed = time.monotonic()

    wait_until(lambda: ticker_of(site) != pid, what="another ticker")

    assert time.monotonic() - killed < 4.0 + SOON
    worker.process.wait()
    test_a_parked_task_starts_when_an_operators_limit_ends(site, key)


def test_a_ticker_that_stops_gives_it_up_before_its_last_task_has_ended(
    site: Site, key: str
) -> None:
    pid = ticker_of(site)
    (worker,) = (each for each in site.workers if each.pid == pid)
    results = occupy(worker, site, key)
    worker.process.terminate()
    stopped = time.monotonic()

    wait_until(lambda: ticker_of(site) != pid, what="another ticker")

    assert worker.running
    assert time.monotonic() - stopped < 2.0 + SOON  # not after the time that it had
    site.journal.open(key)
    for result in results:
        result.get(timeout=30)
    worker.process.wait()
