"""A task that a service sends away runs again, first of all, when its key has rested."""

from __future__ import annotations

import itertools

import pytest

from celery_distlock.errors import LockError

APP = "tests.apps.shares"
WORKERS = [{"concurrency": 2}, {"concurrency": 2}]
SHARED = True


def asked(site, key, result):
    return site.journal.read(f"asked:{key}:{result.id}")


@pytest.mark.parametrize("kind", ["asks", "asks_alone", "asks_late"])
def test_it_runs_again_under_its_id_and_costs_no_retry(site, key, kind):
    result = getattr(site.tasks, kind).delay(key, "44", 0.7)

    assert result.get(timeout=30) == [3, 0]

    times = asked(site, key, result)
    assert len(times) == 3
    assert all(later - earlier >= 0.7 for earlier, later in itertools.pairwise(times))
    assert site.journal.read(f"caught:{key}") == []


def test_no_request_is_granted_until_then_and_it_is_the_first_afterwards(site, key):
    sent_away = site.tasks.asks_alone.delay(key, "4", 2.0)
    site.journal.wait(f"order:{key}")
    others = [site.tasks.asks_alone.delay(key, "") for _ in range(4)]

    for result in [sent_away, *others]:
        result.get(timeout=30)

    order = site.journal.read(f"order:{key}")
    assert order[0] == order[1] == sent_away.id
    assert sorted(order[2:]) == sorted(other.id for other in others)
    assert min(asked(site, key, other)[0] for other in others) >= asked(site, key, sent_away)[1]


def test_it_runs_again_with_the_arguments_it_was_sent_with(site, key):
    result = site.tasks.empties.delay(key, [1, 2, 3])

    assert result.get(timeout=30) == [1, 2, 3]


def test_it_goes_back_more_often_than_failures_may(site, key):
    result = site.tasks.asks.delay(key, "4" * 12, 0.05)

    assert result.get(timeout=60) == [13, 0]


def test_it_is_shown_as_parked_meanwhile(site, key):
    result = site.tasks.asks_alone.delay(key, "4", 600.0)
    site.wait_queued(key)

    assert result.state == "PARKED"
    assert site.look(key).rest > 500
    assert [waiter.run for waiter in site.store.waiters(key)] == [f"{result.id}:0:1:0"]


@pytest.mark.parametrize("how", ["called", "applied"])
def test_without_a_message_it_is_refused(site, key, how):
    task = site.tasks.plainly_postponed
    calls = {"called": lambda: task(key), "applied": lambda: task.apply(args=[key], throw=True)}

    with pytest.raises(LockError, match="without a message of its own") as raised:
        calls[how]()

    assert "postpone() cannot put this run back" in str(raised.value)
    assert not site.look(key).rest


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_what_is_no_time_is_refused(site, key, seconds):
    assert (
        site.tasks.says_of_postponing.delay(key, seconds).get(timeout=30).startswith("ValueError")
    )
