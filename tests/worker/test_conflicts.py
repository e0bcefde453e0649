"""A conflict changes nothing for others: the holder, the rest of a canvas, the broker."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from celery import chain, chord, group
from celery.exceptions import ChordError, MaxRetriesExceededError

from celery_distlock.errors import LockConflictError
from tests.waiting import wait_until

SHARED = True


def wait_lost(site, result) -> None:
    """Wait until the task has found its key taken, and is through with that."""
    marks = [f"[{result.id}] {what}" for what in ("parked", "ignored")]

    def lost() -> bool:
        return result.ready() or any(mark in site.log() for mark in marks)

    wait_until(lost, what=f"the conflict of {result!r}")


def conflicts(site, watched: str) -> int:
    notes = site.journal.read(f"signals:{watched}")
    return sum(note["name"] == "lock_conflict" for note in notes)


# The holder


@pytest.mark.parametrize("policy", ["requeue", "retry", "skip", "fail", "wait"])
def test_the_loser_of_a_conflict_leaves_the_holders_lock_alone(site, key, policy):
    tasks = site.tasks
    task = tasks.work_wait_then["fail"] if policy == "wait" else getattr(tasks, f"work_{policy}")
    holder = tasks.work_requeue.delay(key, "holder", key)
    site.journal.wait(key)
    before = site.look(key)

    loser = task.delay(key)
    wait_lost(site, loser)

    with pytest.raises(LockConflictError):
        tasks.work_fail.delay(key).get(timeout=30)
    after = site.look(key)
    assert (after.owner, after.token) == (before.owner, before.token)
    site.journal.open(key)
    assert holder.get(timeout=30) == 0
    wait_until(loser.ready, what="the loser's end")


# The task


def test_100_conflicts_leave_the_retries_and_the_task_as_they_were(site, key):
    watched = f"watched-{key}"
    with site.held(watched):
        result = site.tasks.use_up_retries.delay(watched)
        wait_until(
            lambda: conflicts(site, watched) >= 100, what="100 conflicts", timeout=90.0, poll=0.1
        )

    with pytest.raises(MaxRetriesExceededError):
        result.get(timeout=30)
    assert site.journal.read(watched) == [[0, 3], [1, 3], [2, 3], [3, 3]]


# Its parent


def test_a_child_that_is_not_parked_and_needs_its_parents_key_is_named_as_a_deadlock(site, key):
    parent = site.tasks.start_a_child.delay(key, key)

    warning = f"needs {key!r}, which its parent {parent.id} holds"
    wait_until(lambda: warning in site.log(), what="the warning")

    site.journal.open(key)
    assert site.app.AsyncResult(parent.get(timeout=30)).get(timeout=30) == 0


# The broker


@pytest.mark.parametrize("way", ["channel", "broker"])
def test_200_tasks_on_one_key_are_delivered_twice_each_at_most(site, key, way):
    if way == "channel":
        results = [site.tasks.count.delay(key) for _ in range(200)]
    else:
        with site.held(key):
            results = [site.tasks.count.delay(key) for _ in range(200)]
            site.wait_queued(key, 200)
            site.forget_channel(key)
    for result in results:
        result.get(timeout=90)

    received = Counter(re.findall(r"count\[([0-9a-f-]+)\] received", site.log()))
    times = [received[result.id] for result in results]
    assert min(times) > 0
    # While a worker is stopped for a moment, the one that is in flight comes by the broker, too.
    assert sum(max(0, each - 2) for each in times) <= 10
    assert site.journal.get(key) == 200
    assert site.journal.read(f"{key}:overlaps") == []


# Canvas


@pytest.fixture
def watched(key):
    return f"watched-{key}"


COMPLETES = pytest.mark.parametrize(
    ("name", "value"),
    [("square", 9), ("square_retry", 9), ("square_wait", 9), ("square_skip", None)],
    ids=["requeue", "retry", "wait", "skip"],
)


def meet(site, key, canvas):
    """Return the result of *canvas*, of which one task found *key* taken when it came."""
    with site.held(key):
        result = canvas.delay()
        wait_until(lambda: conflicts(site, key) or site.look(key).waiting, what="the conflict")
    return result


def two(site, key, name):
    """One task that finds its key taken, and one that does not."""
    task = getattr(site.tasks, name)
    return task.s(key, 3), task.s(f"{key}:free", 4)


@COMPLETES
def test_a_group_of_which_one_finds_its_key_taken_completes(site, watched, name, value):
    result = meet(site, watched, group(two(site, watched, name)))

    assert result.get(timeout=30) == [value, 16]


@COMPLETES
def test_a_chord_of_which_one_finds_its_key_taken_completes(site, watched, name, value):
    result = meet(site, watched, chord(two(site, watched, name), site.tasks.total.s()))

    assert result.get(timeout=30) == (value or 0) + 16


@COMPLETES
def test_a_chain_whose_first_finds_its_key_taken_goes_on(site, watched, name, value):
    first, _ = two(site, watched, name)

    result = meet(site, watched, chain(first, site.tasks.increase.s(f"{watched}:free")))

    assert result.get(timeout=30) == (value or 0) + 1


def test_a_group_of_which_one_fails_for_its_key_fails(site, watched):
    result = meet(site, watched, group(two(site, watched, "square_fail")))

    with pytest.raises(LockConflictError):
        result.get(timeout=30)
    assert result.results[1].get(timeout=30) == 16


def test_a_chord_of_which_one_fails_for_its_key_fails(site, watched):
    result = meet(site, watched, chord(two(site, watched, "square_fail"), site.tasks.total.s()))

    with pytest.raises((LockConflictError, ChordError)):  # of its header, or its own
        result.get(timeout=30)
    wait_until(result.ready, what="the end of the chord")
    assert type(result.result).__name__ == "ChordError"


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_chain_of_which_one_fails_for_its_key_fails(site, watched, place):
    taken, free = site.tasks.square_fail.s(watched, 3), site.tasks.add.s(1, 2)
    links = [taken, free] if place == "first" else [free, taken]
    for link in links:
        link.set(immutable=True)

    result = meet(site, watched, chain(*links))

    with pytest.raises(LockConflictError):
        result.get(timeout=30)
    wait_until(lambda: result.state == "FAILURE", what="the chain's end, after that of its link")
