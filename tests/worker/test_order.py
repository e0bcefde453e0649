"""Tasks of one key run in the order in which their worker received them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site

RUNS = 15  # of each shape: a hundred in all
TASKS = 30

SHAPES: dict[str, dict[str, Any]] = {
    "one process": {"concurrency": 1, "args": ["--prefetch-multiplier", "4"]},
    "one process that fetches one at a time": {"concurrency": 1},
    "four processes": {"concurrency": 4},
    "four processes that fetch many": {"concurrency": 4, "args": ["--prefetch-multiplier", "16"]},
    "four threads": {"pool": "threads", "concurrency": 4, "args": ["--prefetch-multiplier", "4"]},
    "solo": {"pool": "solo", "args": ["--prefetch-multiplier", "4"]},
    "gevent": {"pool": "gevent", "concurrency": 20},
}


@pytest.fixture(scope="module", params=SHAPES)
def site(request, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    if request.param == "gevent":
        pytest.importorskip("gevent")
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [SHAPES[request.param]]) as site:
        yield site


def test_tasks_of_one_key_run_in_the_order_in_which_they_were_received(site, key):
    orders = []
    for run in range(RUNS):
        results = [site.tasks.work_requeue.delay(f"{key}:{run}", n) for n in range(TASKS)]
        for result in results:
            result.get(timeout=60)
        orders.append(site.journal.read(f"{key}:{run}"))

    assert orders == [list(range(TASKS))] * RUNS


def test_tasks_that_are_parked_and_tasks_that_come_later_keep_their_order(site, key):
    with site.held(key):
        results = [site.tasks.work_requeue.delay(key, n) for n in range(5)]
        site.wait_queued(key, 5)
    results += [site.tasks.work_requeue.delay(key, n) for n in range(5, 20)]

    for result in results:
        result.get(timeout=60)
    assert site.journal.read(key) == list(range(20))


def test_tasks_whose_requests_are_of_a_class_of_their_own_keep_their_order(site, key):
    with site.held(key):
        results = [site.tasks.work_by_own_request.delay(key, n) for n in range(5)]
        site.wait_queued(key, 5)

    for result in results:
        result.get(timeout=60)
    assert site.journal.read(key) == list(range(5))
    assert all(site.journal.read(result.id) for result in results)


def test_woken_tasks_that_wait_for_a_slot_keep_their_order(site, key):
    slots = site.workers[0].concurrency
    with site.held(key):
        results = [site.tasks.work_requeue.delay(key, n) for n in range(5)]
        site.wait_queued(key, 5)
        busy = [site.tasks.work_requeue.delay(f"{key}:{n}", None, key) for n in range(slots)]
        for number in range(slots):
            site.journal.wait(f"{key}:{number}")
    # The key is not claimed in time, so the next one is woken.
    wait_until(lambda: site.look(key).woken > 1, timeout=60.0, what="two to be woken")

    site.journal.open(key)

    for result in [*busy, *results]:
        result.get(timeout=60)
    assert site.journal.read(key) == list(range(5))


def test_tasks_that_expire_keep_their_order(site, key):
    results = [
        site.tasks.work_requeue.apply_async((key, n), expires=600 if n % 2 else None)
        for n in range(TASKS)
    ]

    for result in results:
        result.get(timeout=60)
    assert site.journal.read(key) == list(range(TASKS))
