"""What a call is compared with while the one like it waits for a slot of the pool."""

from __future__ import annotations

import pytest

from tests.waiting import wait_until

WORKERS = [{"concurrency": 1}]


def fill(site, key):
    """Send a task that takes the next free slot, until the gate "fill" of *key* is opened."""
    other = f"{key}:fill"
    return site.tasks.work_requeue.delay(other, "fills", other)


@pytest.mark.parametrize("rule", ["update", "update until finished"])
def test_an_update_counts_while_the_task_before_has_not_begun(site, key, rule):
    task = site.tasks.work_once[rule]
    filler = fill(site, key)
    site.journal.wait(f"{key}:fill")
    first = task.delay(key, "a1")
    site.workers[0].wait_log(f"[{first.id}] received")

    second, third = task.delay(key, "b2"), task.delay(key, "c3")

    assert [each.joined for each in (first, second, third)] == [False, False, True]
    assert (second.id == first.id, third.id == second.id) == (False, True)
    site.journal.open(f"{key}:fill")
    for result in (filler, first, third):
        result.get(timeout=30)
    assert site.journal.read(key) == ["a1", "c3"]


def test_a_requeued_task_of_a_key_with_room_is_the_same_and_is_parked(site, key):
    task = site.tasks.fail_once_where_there_is_room
    first = task.delay(key, key)
    site.journal.wait(key)
    filler = fill(site, key)
    site.workers[0].wait_log(f"[{filler.id}] received")
    site.journal.open(f"{key}:1")

    def is_parked():
        return (
            list(site.store.parking.find_parked(first.id, key)) or len(site.journal.read(key)) == 2
        )

    wait_until(lambda: "failed and goes back" in site.log(), what="it to fail")
    wait_until(is_parked, what="it to be parked, or to begin again")
    second = task.delay(key, key)

    assert second.id == first.id
    site.journal.open(f"{key}:fill")
    site.journal.open(f"{key}:2")
    assert second.get(timeout=30) == "done"
    filler.get(timeout=30)
    assert site.journal.read(key) == [first.id, first.id]
