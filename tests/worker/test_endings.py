"""However a task ends, its key is free afterwards; unless it is meant to stay locked."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis

from celery_distlock.errors import LockKeyError
from celery_distlock.rate import Rate
from celery_distlock.stores.values import Limit
from tests.waiting import wait_until

SHARED = True


@pytest.mark.parametrize("how", ["success", "exception", "retry", "ignore", "reject"])
def test_the_key_is_free_after(site, key, how):
    site.tasks.end.delay(key, how)
    site.journal.wait(key)
    site.wait_free(key)  # released, not expired: its lease is of minutes

    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_the_key_that_is_kept_for_a_retry_is_free_when_that_is_discarded(site, key):
    result = site.tasks.hold_for_a_retry.delay(key)
    wait_until(lambda: result.state == "RETRY", what="the retry")
    assert site.look(key).remaining > 60

    result.revoke()

    site.wait_free(key)
    assert result.state == "REVOKED"
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_the_key_is_free_after_a_soft_time_limit(site, key):
    result = site.tasks.sleep_past_soft_limit.delay(key)
    wait_until(lambda: result.state == "FAILURE", what="the soft time limit")

    assert type(result.result).__name__ == "SoftTimeLimitExceeded"
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_the_key_is_free_after_a_hard_time_limit(site, key):
    result = site.tasks.sleep_past_hard_limit.delay(key)
    wait_until(lambda: result.state == "FAILURE", what="the hard time limit")

    assert type(result.result).__name__ == "TimeLimitExceeded"
    assert site.tasks.work_requeue.delay(key).get(timeout=30) == 0


def test_a_rejected_task_that_comes_again_gets_its_key(site, key):
    assert site.tasks.reject_once.delay(key).get(timeout=30) == "done"

    assert len(site.journal.read(key)) == 2


@pytest.mark.parametrize("name", ["fail_by_retry", "fail_by_autoretry"])
def test_a_task_is_retried_as_often_as_it_may_be(site, key, name):
    with pytest.raises(KeyError):
        getattr(site.tasks, name).delay(key).get(timeout=30)

    assert site.journal.read(key) == [0, 1, 2]
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_a_task_that_was_parked_is_retried_as_often_as_any(site, key):
    with site.held(key):
        result = site.tasks.fail_by_retry.delay(key)
        site.wait_queued(key)

    with pytest.raises(KeyError):
        result.get(timeout=30)
    assert site.journal.read(key) == [0, 1, 2]


def test_others_may_run_between_the_attempts_of_a_task(site, key):
    first = site.tasks.end.delay(key, "retry")
    wait_until(lambda: first.state == "RETRY", what="the retry")

    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


LIMITS = {"as often as may be": None, "at an operator's rate": Limit(None, rates=(Rate(1, 1.0),))}


def test_hold_on_retry_keeps_only_what_the_next_attempt_wants(site, key):
    result = site.tasks.retry_with_another_key.delay(key, key)
    wait_until(lambda: result.state == "RETRY", what="the retry to be sent")

    site.wait_free(f"{key}:b")
    assert site.look(f"{key}:a").token
    assert result.get(timeout=30) == [f"{key}:a", f"{key}:next:b"]
    site.wait_free(f"{key}:a")


def test_hold_on_retry_keeps_nothing_for_a_retry_whose_key_cannot_be_made(site, key):
    with pytest.raises(LockKeyError):
        site.tasks.retry_without_a_key.delay(key).get(timeout=30)

    site.wait_free(key)


def test_hold_on_retry_keeps_nothing_for_a_retry_that_was_not_sent(site, key):
    result = site.tasks.call_what_retries.delay(key)
    wait_until(lambda: result.state == "RETRY", what="the task to end")

    site.wait_free(key)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=list(LIMITS))
def test_hold_on_retry_keeps_the_key_between_the_attempts(site, key, limit):
    site.store.units.set_limit(key, limit)
    first = site.tasks.hold_on_retry.delay(key, "first")
    site.journal.wait(key)
    other = site.tasks.work_requeue.delay(key, "other")

    first.get(timeout=30)
    other.get(timeout=30)

    assert site.journal.read(key) == ["first", "first", "first", "other"]
    site.store.units.set_limit(key, None)


def test_a_task_that_fails_goes_to_the_end_of_its_queue(site, key):
    failing = site.tasks.fail_and_requeue.delay(key, "failing", key)
    site.journal.wait(key)
    other = site.tasks.work_requeue.delay(key, "other")
    site.wait_queued(key)
    site.journal.open(key)

    assert other.get(timeout=30) == 0
    with pytest.raises(KeyError):
        failing.get(timeout=30)

    assert failing.state == "FAILURE"
    assert site.journal.read(key) == ["failing", "other", "failing", "failing"]
    assert site.tasks.work_fail.delay(key).get(timeout=30) == 0


def test_a_task_that_failed_shows_that_it_is_parked(site, key):
    result = site.tasks.fail_and_requeue.delay(key, "failing", key)
    site.journal.wait(key)
    with_key = site.tasks.work_requeue.delay(key, "other", f"{key}:other")
    site.wait_queued(key)
    site.journal.open(key)

    wait_until(lambda: result.state == "PARKED", what="the failed task to be parked")
    assert result.info["key"] == key

    site.journal.open(f"{key}:other")
    with_key.get(timeout=30)
    with pytest.raises(KeyError):
        result.get(timeout=30)


# What cannot even begin


def test_a_key_that_cannot_be_made_fails_its_own_task_alone(site, key):
    broken = site.tasks.raise_for_key.delay(key)
    missing = site.tasks.miss_attribute.delay(key)
    well = site.tasks.work_requeue.delay(key)

    assert type(broken.get(timeout=30, propagate=False)).__name__ == "LockKeyError"
    assert type(missing.get(timeout=30, propagate=False)).__name__ == "LockKeyError"
    assert "KeyError" in str(broken.result)
    assert broken.state == missing.state == "FAILURE"
    assert well.get(timeout=30) == 0
    assert len(site.journal.read(key)) == 1


def test_a_record_of_another_type_fails_with_the_keys_name(site, key, redis_url):
    with closing(redis.Redis.from_url(redis_url)) as client:
        client.set(site.record(key), "something else")
        result = site.tasks.work_requeue.delay(key).get(timeout=30, propagate=False)
        assert client.get(site.record(key)) == b"something else"
        client.delete(site.record(key))

    assert type(result).__name__ == "StoreError"
    assert key in str(result)
    assert site.tasks.work_requeue.delay(key).get(timeout=30) == 0
