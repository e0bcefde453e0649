"""Tasks that wait for their key for a limited time, and how they end."""

from __future__ import annotations

import time

import pytest
from celery import chord
from celery.exceptions import ChordError, TaskRevokedError

from celery_distlock.errors import LockConflictError
from tests.waiting import wait_until

SHARED = True

via_each = pytest.mark.parametrize("via", ["store", "broker"])


def wait_gone(site, key, task_id):
    """Wait until the store knows nothing of a task."""
    wait_until(lambda: not list(site.store.parking.find_parked(task_id, key)), what="it to be gone")
    assert site.look(key).waiting == 0


@via_each
def test_a_task_that_has_waited_for_long_enough_fails(site, key, via):
    with site.held(key):
        called_at = time.monotonic()
        result = site.tasks.work_for_a_second.apply_async((key, 1), lock_via=via)

        with pytest.raises(LockConflictError) as raised:
            result.get(timeout=60)

        assert time.monotonic() - called_at >= 1.0
        assert (raised.value.key, raised.value.holder) == (key, site.look(key).owner)
        assert result.state == "FAILURE"
        wait_gone(site, key, result.id)
    site.wait_free(key)
    assert site.tasks.work_for_a_second.delay(key, 2).get(timeout=30) == 0
    assert site.journal.read(key) == [2]


@via_each
def test_it_is_skipped_if_its_policy_says_so(site, key, via):
    with site.held(key):
        result = site.tasks.work_for_a_second_or_late.apply_async((key, 1), lock_via=via)

        assert result.get(timeout=60) == "late"
        wait_gone(site, key, result.id)
    assert site.journal.read(key) == []


def test_it_is_sent_again_by_countdown_if_its_policy_says_so(site, key):
    with site.held(key):
        result = site.tasks.work_for_a_second_or_later.delay(key, 1)
        wait_until(
            lambda: "is sent again in" in site.log() and not site.look(key).waiting,
            what="it to leave the queue",
            timeout=60,
        )
    assert result.get(timeout=60) == 0
    assert site.journal.read(key) == [1]


def test_one_that_gets_its_key_in_time_runs(site, key):
    with site.held(key):
        result = site.tasks.work_for_a_minute.delay(key, 1)
        site.wait_queued(key)
    assert result.get(timeout=30) == 0
    assert site.journal.read(key) == [1]


def test_an_errback_hears_of_it(site, key):
    with site.held(key):
        failed = site.tasks.work_for_a_second.apply_async(
            (key, 1), link_error=site.tasks.count.si(f"{key}:failed")
        )

        with pytest.raises(LockConflictError):
            failed.get(timeout=60)
        wait_until(lambda: site.journal.get(f"{key}:failed"), what="the errback")


def test_a_chord_fails_with_a_member_that_gives_up(site, key):
    with site.held(key):
        members = [site.tasks.work_for_a_second.si(key, 1), site.tasks.add.si(1, 2)]
        result = chord(members)(site.tasks.total.si([1]))

        with pytest.raises((ChordError, LockConflictError), match="is held by"):
            result.get(timeout=60)
        wait_until(lambda: result.state == "FAILURE", what="the chord's end")


def test_an_identity_is_free_when_its_task_has_given_up(site, key):
    with site.held(key):
        task = site.tasks.work_once_for_a_while
        first = task.delay(key, 1)
        assert task.delay(key, 1).id == first.id
        with pytest.raises(LockConflictError):
            first.get(timeout=60)
        wait_gone(site, key, first.id)

        again = task.delay(key, 1)

        assert again.id != first.id
    assert again.get(timeout=60) == 0


def test_a_task_of_several_keys_gives_up_all_of_them(site, key):
    with site.held(f"{key}:b"):
        result = site.tasks.work_with_two_for_a_second.delay(key, 1)

        with pytest.raises(LockConflictError, match=f"{key}:b"):
            result.get(timeout=60)
        for each in "ab":
            wait_until(lambda at=f"{key}:{each}": not site.look(at).waiting, what="its end")
        site.wait_free(f"{key}:a")


def test_a_policy_learns_for_how_long_its_task_has_waited(site, key):
    with site.held(key):
        result = site.tasks.work_or_waited.delay(key, 1)

        assert result.get(timeout=60) >= 1.0


@via_each
def test_a_task_expires_in_time_though_its_key_is_held(site, key, via):
    with site.held(key):
        result = site.tasks.work_requeue.apply_async((key, 1), expires=1.0, lock_via=via)

        with pytest.raises(TaskRevokedError, match="expired"):
            result.get(timeout=60)
        wait_gone(site, key, result.id)
    assert site.journal.read(key) == []
