"""A pool without a free place, and keys that several may have: what is skipped, and what waits."""

from __future__ import annotations

import pytest

from tests.waiting import wait_until
from tests.worker.units import faults, held

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 2, "args": ["--prefetch-multiplier", "4"]}]


@pytest.fixture
def busy(site, key):
    """One unit of two is in use, and both places of the pool, until the gates are opened."""
    running = site.tasks.use_or_skip.delay(key, gate=key)
    other = site.tasks.write.delay(f"{key}:other", gate=f"{key}:other")
    site.journal.wait(f"begun:{key}")
    site.journal.wait(f"begun:{key}:other")
    yield [running, other]
    for gate in (key, f"{key}:other"):
        site.journal.open(gate)
    for result in (running, other):
        result.get(timeout=30)
    assert not list(faults(held(site, key)))


def received(site, *results) -> None:
    """Wait until the worker's main process has looked at what was sent."""
    for result in results:
        site.workers[0].wait_log(f"[{result.id}] received")


def tasks_of(site, key):
    return {note["task"] for note in held(site, key)}


def test_one_with_a_unit_waits_for_its_place_and_the_next_is_skipped(site, key, busy):
    fits = site.tasks.use_or_skip.delay(key, 0.0)
    received(site, fits)
    skipped = [site.tasks.use_or_skip.delay(key, 0.0) for _ in range(5)]
    received(site, *skipped)

    for gate in (key, f"{key}:other"):
        site.journal.open(gate)
    for result in (fits, *skipped):
        assert result.get(timeout=30) is None

    site.journal.wait("held", 3)
    assert fits.id in tasks_of(site, key)
    assert not tasks_of(site, key) & {result.id for result in skipped}


def test_those_with_room_are_not_parked(site, key, busy):
    readers = [site.tasks.read.delay(f"{key}:read", 0.0) for _ in range(4)]
    received(site, *readers)

    assert not site.look(f"{key}:read").waiting

    for gate in (key, f"{key}:other"):
        site.journal.open(gate)
    for result in readers:
        result.get(timeout=30)


def test_a_writer_is_parked_behind_readers_that_wait_for_a_place(site, key, busy):
    readers = [site.tasks.read.delay(f"{key}:read", 0.0) for _ in range(2)]
    received(site, *readers)
    writer = site.tasks.write.delay(f"{key}:read", 0.0)
    wait_until(lambda: writer.state == "PARKED", what="the writer to be parked")

    for gate in (key, f"{key}:other"):
        site.journal.open(gate)
    for result in (*readers, writer):
        result.get(timeout=30)

    begins = {
        note["task"]: note["begin"] for note in held(site, key) if note["key"] == f"{key}:read"
    }
    assert max(begins, key=begins.__getitem__) == writer.id
