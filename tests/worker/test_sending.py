"""Calls that go through the store: into their key's queue, to the broker when they may start."""

from __future__ import annotations

import contextlib
import datetime
import math
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from celery import chain

from celery_distlock.errors import ConfigurationError, LockKeyError
from celery_distlock.ops.admin import Admin
from tests.threads import in_threads
from tests.waiting import wait_until

if TYPE_CHECKING:
    pass

ENV = {"DISTLOCK_TEST_VIA": "store"}
SHARED = True

pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex")  # of Celery's backend


# Where they are


def test_a_call_to_a_free_key_runs(site, key):
    assert site.tasks.work_requeue.delay(key, 1).get(timeout=30) == 0

    assert site.journal.read(key) == [1]


def test_a_call_to_a_taken_key_waits_in_the_store_and_nowhere_else(site, key):
    with site.held(key):
        result = site.tasks.work_requeue.delay(key, 1)

        assert site.look(key).waiting == 1
        assert site.unread() == 0
    assert result.get(timeout=30) == 0


def test_tasks_of_one_key_run_in_the_order_of_their_calls_over_all_workers(site, key):
    results = [site.tasks.work_requeue.delay(key, number) for number in range(60)]

    for result in results:
        result.get(timeout=60)
    assert site.journal.read(key) == list(range(60))


def test_one_at_a_time_runs(site, key):
    results = [site.tasks.count.delay(key) for _ in range(30)]

    for result in results:
        result.get(timeout=60)
    assert site.journal.get(key) == 30
    assert site.journal.read(f"{key}:overlaps") == []


def test_each_call_keeps_its_id(site, key):
    task_id = f"mine-{uuid.uuid4()}"

    result = site.tasks.work_requeue.apply_async((key, 1), task_id=task_id)

    assert result.id == task_id
    assert result.get(timeout=30) == 0


def test_a_task_that_has_ended_runs_again_if_it_is_sent_again_by_its_id(site, key):
    task_id = f"mine-{uuid.uuid4()}"
    for _ in range(2):
        site.tasks.work_requeue.apply_async((key, 1), task_id=task_id).get(timeout=30)
        site.wait_free(key)

    wait_until(lambda: len(site.journal.read(key)) == 2, what="two runs")


def test_the_key_is_that_which_the_worker_makes_of_the_arguments(site, key):
    with site.held(f"{key}:[1, [2, 3]]"):
        result = site.tasks.work_by_anything.delay(key, (1, (2, 3)))

        site.wait_queued(f"{key}:[1, [2, 3]]")  # JSON knows no tuples
    assert result.get(timeout=30) == f"{key}:[1, [2, 3]]"


@pytest.mark.parametrize("given", ["a model's fields", "a model"])
def test_the_key_equals_the_workers_for_a_model_as_well(site, key, given):
    task, about = site.tasks.work_validated_by_anything, {"key": key}
    if given == "a model":
        if not hasattr(task, "_dump_pydantic_arguments"):
            pytest.skip("this version of Celery sends no models")
        about = site.tasks.Keyed(**about)
    with site.held(f"{key}:[1, 2]"):
        result = task.delay(about, (1, 2))

        site.wait_queued(f"{key}:[1, 2]")
        assert result.state == "PENDING"  # no worker had to park it
    assert result.get(timeout=30) == f"{key}:[1, 2]"


# Later


@pytest.mark.parametrize("by", ["countdown", "eta"])
def test_a_delayed_call_blocks_no_other_and_starts_in_time(site, key, by):
    delay = 2.0
    due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=delay)
    begin = time.monotonic()
    late = site.tasks.work_requeue.apply_async(
        (key, "late"), **({"countdown": delay} if by == "countdown" else {"eta": due})
    )
    site.tasks.work_requeue.delay(key, "now").get(timeout=30)
    assert site.unread() == 0
    assert late.state == "PENDING"

    late.get(timeout=30)
    assert time.monotonic() - begin >= delay - 0.1
    assert site.journal.read(key) == ["now", "late"]


def test_a_delayed_call_can_be_dropped(site, key):
    result = site.tasks.work_requeue.apply_async((key, 1), countdown=600)

    dropped = Admin(site.app).drop(result.id)

    assert dropped
    assert not list(site.store.parking.find_parked(result.id))


def test_a_retry_with_a_countdown_waits_in_the_store(site, key):
    result = site.tasks.end.delay(key, "retry")
    wait_until(lambda: result.state == "RETRY", what="a retry")

    wait_until(
        lambda: list(site.store.parking.find_parked(result.id)), what="it to be in the store"
    )
    assert site.unread() == 0
    assert site.tasks.work_requeue.delay(key, "other").get(timeout=30) == 0
    assert Admin(site.app).drop(result.id)


def test_retries_run(site, key):
    result = site.tasks.fail_by_retry.delay(key)

    with pytest.raises(KeyError):
        result.get(timeout=30)
    assert site.journal.read(key) == [0, 1, 2]


def test_hold_on_retry_keeps_the_key_between_the_attempts(site, key):
    first = site.tasks.hold_on_retry.delay(key, "first")
    site.journal.wait(key)
    second = site.tasks.hold_on_retry.delay(key, "second")

    for result in (first, second):
        result.get(timeout=60)
    assert site.journal.read(key)[:3] == ["first"] * 3


def test_an_expired_call_does_not_run_and_blocks_no_other(site, key):
    with site.held(key):
        expiring = site.tasks.work_requeue.apply_async((key, "expired"), expires=0.3)
        other = site.tasks.work_requeue.delay(key, "other")
        after = time.monotonic() + 0.5
        wait_until(lambda: time.monotonic() > after, what="the expiry")

    other.get(timeout=30)
    wait_until(lambda: expiring.state == "REVOKED", what="the expired call's state")
    assert site.journal.read(key) == ["other"]


def test_a_revoked_call_does_not_run_and_blocks_no_other(site, key):
    with site.held(key):
        revoked = site.tasks.work_requeue.delay(key, "revoked")
        other = site.tasks.work_requeue.delay(key, "other")
        revoked.revoke()
        for worker in site.workers:
            worker.wait_log(f"Tasks flagged as revoked: {revoked.id}")

    other.get(timeout=30)
    wait_until(lambda: revoked.state == "REVOKED", what="the revoked call's state")
    assert site.journal.read(key) == ["other"]


# From where


def test_a_task_that_holds_the_key_may_send_one_that_needs_it(site, key):
    result = site.tasks.start_a_child.delay(key, key)
    site.journal.open(key)

    child = site.app.AsyncResult(result.get(timeout=30))
    assert child.get(timeout=30) == 0


def test_links_of_a_call_run(site, key):
    linked = site.tasks.work_requeue.si(f"{key}:linked", 2)
    with site.held(key):
        result = site.tasks.work_requeue.apply_async((key, 1), link=linked)

    result.get(timeout=30)
    site.journal.wait(f"{key}:linked")


def test_threads_may_send_at_once(site, key):
    ids: list[str] = []

    def send() -> None:  # a result has the backend of its thread
        ids.extend(site.tasks.count.delay(key).id for _ in range(10))

    in_threads(send)

    for task_id in ids:
        site.app.AsyncResult(task_id).get(timeout=60)
    assert site.journal.get(key) == 40


# What does not


def test_a_call_may_go_by_the_broker(site, key):
    with site.held(key):
        result = site.tasks.work_requeue.apply_async((key, 1), lock_via="broker")
        wait_until(lambda: result.state == "PARKED", what="it to be parked by a worker")

    assert result.get(timeout=30) == 0


def test_a_call_without_a_key_goes_by_the_broker(site, key):
    result = site.tasks.work_without_key.apply_async((key,), countdown=0.1)

    assert result.get(timeout=30) == "ran"
    assert not [found for keys in site.store.find_keys(f"*{key}*") for found in keys]


def test_apply_and_direct_calls_are_as_ever(site, key):
    assert site.tasks.work_requeue.apply((key, 1)).get() == 0
    assert site.tasks.work_requeue(key, 2) == 0

    assert site.journal.read(key) == [1, 2]


def test_a_key_that_cannot_be_made_is_said_where_the_call_is_made(site):
    with pytest.raises(LockKeyError):
        site.tasks.work_requeue.delay("")


def test_wrong_arguments_are_said_where_the_call_is_made(site):
    with pytest.raises(TypeError):
        site.tasks.work_requeue.delay()


@pytest.mark.parametrize("countdown", [math.nan, -math.inf, math.inf, 1e18, 10**400, "3"])
def test_a_countdown_that_has_no_end_in_time_is_refused_as_celery_does(site, key, countdown):
    for options in ({"lock_via": "broker"}, {}):
        with pytest.raises((ValueError, OverflowError, TypeError)):
            site.tasks.work_requeue.apply_async((key, 1), countdown=countdown, **options)

    assert site.look(key).later == site.look(key).waiting == site.unread() == 0


def test_a_policy_that_does_not_wait_cannot_be_sent_so(site, key):
    with pytest.raises(ConfigurationError, match="needs lock_on_conflict='requeue'"):
        site.tasks.work_skip.apply_async((key,), lock_via="store")


def test_an_unknown_way_is_refused(site, key):
    with pytest.raises(ConfigurationError, match="did you mean 'store'"):
        site.tasks.work_requeue.apply_async((key,), lock_via="stor")


def test_several_keys_cannot_be_waited_for_so(site, key):
    with pytest.raises(ConfigurationError, match="lock_key returns 2"):
        site.tasks.work_two_keys.apply_async((key,), lock_via="store")

    site.tasks.work_two_keys.delay(key).get(timeout=30)


# The broker is unreachable


def test_a_call_is_accepted_while_the_broker_is_unreachable(site, key):
    once = {"max_retries": 1, "interval_start": 0.0, "interval_step": 0.0}
    gone = site.app.connection_for_write("redis://127.0.0.1:1/0", transport_options=once)
    options = {"connection": gone, "retry": False}

    results = [site.tasks.work_requeue.apply_async((key, number), **options) for number in range(3)]

    for result in results:
        assert result.get(timeout=60) == 0
    assert site.journal.read(key) == [0, 1, 2]


@contextlib.contextmanager
def a_full_pool(app):
    """Have all producers of the app's pool in use."""
    pool = app.amqp.producer_pool
    with contextlib.ExitStack() as stack:
        for _ in range(pool.limit):
            stack.enter_context(pool.acquire(block=True))
        yield


def test_a_call_that_waits_in_the_store_needs_no_connection_to_the_broker(site, key):
    with site.held(key):
        with a_full_pool(site.app):
            result = site.tasks.work_requeue.delay(key, 1)
        assert site.look(key).waiting == 1

    assert result.get(timeout=30) == 0


def test_chains_are_sent_through_the_store(site, key):
    with site.held(f"{key}:2"):
        result = chain(
            site.tasks.work_requeue.si(f"{key}:1", 1), site.tasks.work_requeue.si(f"{key}:2", 2)
        ).delay()
        site.wait_queued(f"{key}:2")
        assert site.unread() == 0

    assert result.get(timeout=30) == 0
