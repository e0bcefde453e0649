"""
What "skip" and "fail" make of a task that comes while the pool has no place for it.

Solo and gevent workers receive nothing then.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import pytest
from celery import chain, chord

from celery_distlock import Lock
from celery_distlock.errors import LockConflictError
from celery_distlock.naming import holder_name
from tests.waiting import wait_until
from tests.worker.conftest import staffed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.worker.conftest import Site


@pytest.fixture(scope="module", params=["prefork", "threads"])
def site(request, bare_site: Site, tmp_path_factory) -> Iterator[Site]:
    """One worker with one place."""
    worker = {
        "pool": request.param,
        "concurrency": 1,
        "args": ["--prefetch-multiplier", "4"],
    }
    with staffed(bare_site, tmp_path_factory.mktemp("workers"), [worker]) as site:
        yield site


@pytest.fixture
def busy(site, key):
    """A task that has its key and the pool's one place, until its gate is opened."""
    running = site.tasks.work_skip.delay(key, "running", key)
    site.journal.wait(key)
    yield running
    site.journal.open(key)
    running.get(timeout=30)


def received(site, *results) -> None:
    """Wait until the worker's main process has looked at what was sent."""
    for result in results:
        site.workers[0].wait_log(f"[{result.id}] received")


def test_a_task_that_comes_while_one_of_this_worker_runs_is_skipped(site, key, busy):
    # More than are fetched beforehand.
    late = [site.tasks.work_skip.delay(key, number) for number in range(12)]
    received(site, *late)

    site.journal.open(key)

    assert [result.get(timeout=30) for result in late] == [None] * 12
    assert site.journal.read(key) == ["running"]
    assert site.tasks.work_skip.delay(key, "after").get(timeout=30) == 0


def test_a_task_that_comes_while_one_of_this_worker_runs_fails(site, key, busy):
    holder = site.look(key).owner
    late = site.tasks.work_fail.delay(key, "late")
    received(site, late)
    site.journal.open(key)

    with pytest.raises(LockConflictError) as caught:
        late.get(timeout=30)

    assert caught.value.key == key
    assert caught.value.holder == holder
    assert site.journal.read(key) == ["running"]


def test_a_task_that_comes_while_another_has_the_key_is_skipped(site, key, busy):
    other = f"{key}-other"
    with site.held(other):
        late = site.tasks.work_skip_with_result.delay(other)
        received(site, late)

    site.journal.open(key)

    assert late.get(timeout=30) == {"busy": True}
    assert site.journal.read(other) == []


def test_of_those_that_wait_for_a_place_the_first_runs(site, key, busy):
    other = f"{key}-other"
    first, *late = [site.tasks.work_skip.delay(other, number) for number in range(5)]
    received(site, first, *late)

    site.journal.open(key)

    assert [result.get(timeout=30) for result in (first, *late)] == [0, None, None, None, None]
    assert site.journal.read(other) == [0]
    assert "which waits for a process" in site.log()


def test_a_task_that_comes_while_the_key_is_free_runs(site, key, busy):
    other = f"{key}-other"
    late = site.tasks.work_skip.delay(other, "late")
    received(site, late)

    site.journal.open(key)

    assert late.get(timeout=30) == 0


def test_it_is_reported_as_any_conflict_is(site, key, busy):
    watched = f"watched-{key}"
    with site.held(watched):
        holder = holder_name(site.look(watched).owner)
        late = site.tasks.work_skip.delay(watched)
        received(site, late)
    site.journal.open(key)
    late.get(timeout=30)

    notes = site.journal.read(f"signals:{watched}")
    assert "lock_conflict" in [note["name"] for note in notes]
    assert f"work_skip[{late.id}] skipped: '{watched}' is held by {holder}" in site.log()


def test_what_comes_after_it_goes_on(site, key, busy):
    other = f"{key}-other"
    with site.held(other):
        linked = chain(
            site.tasks.square_skip.s(other, 3), site.tasks.increase.s(f"{other}-next")
        ).delay()
        counted = chord(
            [site.tasks.square_skip.s(other, 3), site.tasks.square_skip.s(f"{other}-2", 4)],
            site.tasks.total.s(),
        ).delay()
        wait_until(
            lambda: len(re.findall(r"square_skip\[.*\] received", site.log())) >= 3,
            what="three that are received",
        )
        failed = site.tasks.square_fail.delay(other, 3)
        received(site, failed)

    site.journal.open(key)

    assert linked.get(timeout=30) == 1
    assert counted.get(timeout=30) == 16
    with pytest.raises(LockConflictError):
        failed.get(timeout=30)


def test_one_that_has_expired_by_then_is_revoked_and_not_skipped(site, key, busy):
    late = site.tasks.work_skip.apply_async((key,), expires=0.5)
    received(site, late)
    other = site.tasks.work_skip.apply_async((f"{key}-other",), expires=0.001)

    wait_until(lambda: other.state == "REVOKED", what="the expired one's end")
    site.journal.open(key)
    assert late.get(timeout=30) is None


def test_one_that_is_revoked_while_it_waits_does_not_run(site, key, busy):
    late = site.tasks.work_skip.delay(key)
    received(site, late)
    site.app.control.revoke(late.id)
    site.workers[0].wait_log(f"flagged as revoked: {late.id}")

    site.journal.open(key)

    wait_until(late.ready, what="its end")
    assert site.journal.read(key) == ["running"]


def test_one_with_an_eta_is_not_looked_at_before(site, key, busy):
    other = f"{key}-other"
    with site.held(other):
        later = site.tasks.work_skip.apply_async((other,), countdown=1.0)
        received(site, later)
    site.journal.open(key)

    assert later.get(timeout=30) == 0


def test_jobs_that_are_sent_faster_than_they_end_do_not_pile_up(site, key):
    """One a tenth of a second, of half a second each: most are left out, and none is late."""
    sent = []
    for _ in range(30):
        sent.append(site.tasks.nap_skip.delay(key, 0.5))
        time.sleep(0.1)
    last_sent = time.monotonic()

    ran = [result.get(timeout=60) for result in sent].count("ran")

    assert time.monotonic() - last_sent < 4.0  # 15 s if all of them ran
    assert 2 <= ran <= 12


def test_a_place_that_is_free_is_taken_and_the_key_asked_for_there(site, key):
    with Lock(key, store=site.store):
        assert site.tasks.work_skip.delay(key).get(timeout=30) is None
    assert site.tasks.work_skip.delay(key).get(timeout=30) == 0
