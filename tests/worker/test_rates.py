"""A key that is taken only so often: by the tasks' own clock, over workers that are killed."""

from __future__ import annotations

import bisect
import itertools
import time

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockConflictError
from tests.waiting import wait_until

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 4}, {"concurrency": 1}]
READ = 0.3  # seconds between a start and when its task reads the clock, on a busy machine


@pytest.fixture(autouse=True)
def _both_run(site):
    for worker in site.workers:
        if not worker.running:
            worker.start()


def worst(times, per):
    """How many starts the fullest window of that length has."""
    times = sorted(times)
    return max(bisect.bisect_left(times, at + per) - i for i, at in enumerate(times))


@pytest.mark.parametrize("kind", ["often", "often_at_once"])
def test_no_second_has_more_starts_than_the_limit(site, key, kind):
    results = [getattr(site.tasks, kind).delay(key) for _ in range(70)]

    for result in results:
        result.get(timeout=60)

    times = sorted(site.journal.read(f"starts:{key}"))
    assert len(times) == 70
    assert worst(times, 1.0 - READ) <= 20
    assert times[-1] - times[0] < 12.0  # it is used


def test_two_rates_hold_at_once(site, key):
    results = [site.tasks.by_two_rates.delay(key) for _ in range(26)]

    for result in results:
        result.get(timeout=60)

    times = site.journal.read(f"starts:{key}")
    assert worst(times, 1.0 - READ) <= 5
    assert worst(times, 4.0 - READ) <= 12


def test_it_holds_over_workers_that_are_killed(site, key):
    for _ in range(150):
        site.tasks.often.delay(key)
    site.journal.wait(f"starts:{key}", 20)
    site.workers[0].kill(whole=True)  # with what it had fetched, which comes again much later
    site.journal.wait(f"starts:{key}", 40, timeout=60)
    site.workers[0].start()
    site.journal.wait(f"starts:{key}", 70, timeout=60)

    assert worst(site.journal.read(f"starts:{key}"), 1.0 - READ) <= 20


def test_a_waiter_for_a_rate_holds_no_slot_and_no_prefetch(site, key):
    site.workers[0].stop()
    site.tasks.seldom.delay(key).get(timeout=30)
    waiting = [site.tasks.seldom.delay(key) for _ in range(10)]
    wait_until(lambda: site.look(key).waiting == 10, what="all to wait")

    begin = time.monotonic()
    for number in range(5):
        site.tasks.use.delay(f"{key}-{number}", 0.0).get(timeout=30)

    assert time.monotonic() - begin < 15
    assert {result.state for result in waiting} == {"PARKED"}


def test_a_waiter_for_a_rate_waits_for_no_holder(site, key):
    site.tasks.seldom.delay(key).get(timeout=30)

    result = site.tasks.seldom.delay(key)
    wait_until(lambda: site.look(key).waiting == 1, what="it to wait")

    def said():
        lines = [line for line in site.log().splitlines() if result.id in line]
        return [line for line in lines if f"parked: '{key}' opens by its rate in 3" in line]

    wait_until(said, what="its worker to say why")


def test_the_state_of_a_waiter_for_a_rate_says_when_it_is_due(site, key):
    site.tasks.seldom.delay(key).get(timeout=30)

    results = []
    for number in (1, 2):
        results.append(site.tasks.seldom.delay(key))
        wait_until(lambda n=number: site.look(key).waiting == n, what="it to wait")

    first, second = [result.info for result in results]
    assert (first["place"], second["place"]) == (0, 1)
    assert 3000 < first["due"] - time.time() < 4000
    assert "due" not in second


def test_a_lock_that_gives_up_says_when_its_rate_lets_it_in(site, key):
    def lock():
        return Lock(key, rate="1/h", capacity=1, timeout=0.1, store=site.store)

    with lock():
        pass
    with pytest.raises(LockConflictError, match="admits no holder for 3") as caught:
        lock().__enter__()
    assert 3000 < caught.value.wait <= 3600


def test_one_that_comes_again_by_countdown_gets_the_time(site, key):
    results = [site.tasks.often_again.delay(key) for _ in range(10)]

    for result in results:
        result.get(timeout=60)

    assert worst(site.journal.read(f"starts:{key}"), 1.0 - READ) <= 20


def test_a_lock_waits_for_its_rate_among_tasks(site, key):
    from celery_distlock import Lock

    lock = Lock(key, shared=True, rate="20/s", store=site.store, timeout=30.0)
    results = [site.tasks.often.delay(key) for _ in range(10)]
    times = []
    for _ in range(10):
        with lock:
            times.append(time.time())
    for result in results:
        result.get(timeout=60)

    every = [*times, *site.journal.read(f"starts:{key}")]
    assert worst(every, 1.0 - READ) <= 20
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert sum(gaps) >= 9 * 0.05 - 0.1
