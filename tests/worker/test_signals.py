"""The signals are sent from where it happens, with the arguments that they are documented with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.waiting import wait_until

if TYPE_CHECKING:
    from typing import Any

SHARED = True


@pytest.fixture
def watched(key: str) -> str:
    """A key whose signals are written down."""
    return f"watched-{key}"


def of_tasks(site, watched: str) -> list[dict[str, Any]]:
    """The signals that tasks have sent; not those of this process's own lock."""
    return [note for note in site.journal.read(f"signals:{watched}") if note["sender"]]


def but_renewals(notes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """*notes* without what a task that was held up may send in between."""
    return [note for note in notes if note["name"] != "lock_renewed"]


def named(site, watched: str, name: str) -> dict[str, Any]:
    """Wait for the first signal *name* of a task, and return its sender and arguments."""

    def find() -> list[dict[str, Any]]:
        return [note for note in of_tasks(site, watched) if note["name"] == name]

    return wait_until(find, what=f"signal {name}")[0]


def test_a_task_acquires_and_releases(site, watched):
    result = site.tasks.look.delay(watched)
    token = result.get(timeout=30)["token"]
    named(site, watched, "lock_released")

    acquired, released = but_renewals(of_tasks(site, watched))

    holder = acquired["holder"]
    assert "look" in holder
    facts = {
        "sender": "tests.apps.locked.look",
        "token": token,
        "holder": holder,
        "task_id": result.id,
    }
    assert (acquired.pop("waited") >= 0, acquired.pop("waited_for")) == (True, "nothing")
    assert (acquired.pop("units"), acquired.pop("capacity")) == (1, 1)
    assert released.pop("held") > 0
    assert acquired == {"name": "lock_acquired", **facts}
    assert released == {"name": "lock_released", **facts}


def test_a_long_task_renews(site, watched):
    site.tasks.work_requeue.delay(watched, None, watched)
    acquired = named(site, watched, "lock_acquired")

    renewed = named(site, watched, "lock_renewed")
    site.journal.open(watched)
    for name in ("waited", "waited_for", "units", "capacity"):
        del acquired[name]

    assert renewed == {**acquired, "name": "lock_renewed"}


def test_a_parked_task_reports_conflict_parking_and_waking(site, watched):
    with site.held(watched):
        holder = site.look(watched).owner
        result = site.tasks.work_requeue.delay(watched)
        site.wait_queued(watched)
        parked_at = time.monotonic()
        conflict = named(site, watched, "lock_conflict")
        parked = named(site, watched, "task_parked")
        at_least = time.monotonic() - parked_at
    result.get(timeout=30)
    woken = named(site, watched, "task_woken")
    named(site, watched, "lock_released")

    sender = "work_requeue"
    assert 0 < conflict.pop("remaining") <= 30.0
    facts = {"sender": sender, "holder": holder, "task_id": result.id}
    assert conflict == {"name": "lock_conflict", **facts}
    assert parked == {"name": "task_parked", "place": 0, **facts}
    assert woken.pop("waited") >= at_least
    assert woken == {"name": "task_woken", "sender": sender, "task_id": result.id}
    assert [note["name"] for note in but_renewals(of_tasks(site, watched))] == [
        "lock_conflict",
        "task_parked",
        "lock_acquired",
        "task_woken",
        "lock_released",
    ]


def test_a_lost_lock_is_reported_with_a_reason(site, watched):
    site.tasks.sleep_long.delay(watched)
    acquired = named(site, watched, "lock_acquired")

    site.forget(watched)
    lost = named(site, watched, "lock_lost")
    for name in ("waited", "waited_for", "units", "capacity"):
        del acquired[name]

    assert lost.pop("held") > 0
    assert lost == {**acquired, "name": "lock_lost", "reason": "the store no longer knows it"}


@pytest.mark.parametrize("name", ["work_skip", "work_fail"])
def test_a_conflict_is_reported_with_any_policy(site, watched, name):
    with site.held(watched):
        getattr(site.tasks, name).delay(watched).get(timeout=30, propagate=False)

    assert [note["name"] for note in of_tasks(site, watched)] == ["lock_conflict"]


def test_a_killed_process_s_key_is_reported_as_freed(site, watched):
    site.tasks.die.delay(watched, "exit")

    freed = wait_until(
        lambda: [
            note for note in site.journal.read(f"signals:{watched}") if note["name"] == "lock_freed"
        ],
        what="the key to be freed",
    )[0]

    assert freed["reason"] == "its process is gone"
    assert "die" in freed["holder"]
