"""Locked tasks whose other base classes change, defer or wrap their calls."""

from __future__ import annotations

import time

import pytest

from celery_distlock.errors import ConfigurationError
from tests.waiting import wait_until

APP = "tests.apps.bases"
WORKERS = [{"concurrency": 2}]
EVERY = [(order, way) for order in ("before", "behind") for way in ("broker", "store", "unique")]


def ensure_pool_is_free(app):
    """Acquire every producer that the process may have, at once; give them back."""
    pool = app.producer_pool
    acquired = [pool.acquire(block=False) for _ in range(app.conf.broker_pool_limit)]
    for producer in acquired:
        producer.release()


@pytest.mark.parametrize(("order", "way"), EVERY)
def test_calls_that_a_base_defers_are_sent_at_the_commit(site, key, order, way):
    task = site.tasks.on_commit[order, way]
    notes = [str(number) for number in range(4)]

    assert [task.delay(key, note) for note in notes] == [None] * 4
    assert site.look(key).waiting == 0
    with site.held(key):
        results = site.tasks.commit()
        ensure_pool_is_free(site.app)
        site.wait_queued(key, 4)

    for result in results:
        result.get(timeout=30)
    assert site.journal.read(key) == notes


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_deferred_call_is_no_duplicate_of_a_run_that_begins_before_the_commit(site, key, order):
    task = site.tasks.on_commit[order, "unique"]
    with site.held(key):
        task.delay(key)
        (earlier,) = site.tasks.commit()
        site.wait_queued(key)
        assert task.delay(key) is None  # in a transaction, whose rows the earlier one cannot see
    earlier.get(timeout=30)

    (result,) = site.tasks.commit()

    assert not result.joined
    result.get(timeout=30)
    assert site.journal.read(key) == ["", ""]


@pytest.mark.parametrize(("order", "way"), EVERY)
def test_a_keyword_that_a_base_adds_and_takes_away_is_no_part_of_the_call(site, key, order, way):
    task = site.tasks.traced[order, way]
    with site.held(key):
        results = [task.delay(key) for _ in range(2)]
        site.wait_queued(key, 1 if way == "unique" else 2)

    assert all(result.get(timeout=30).startswith("trace ") for result in results)
    assert [result.joined for result in results] == [False, way == "unique"]


@pytest.mark.parametrize(("order", "way"), EVERY)
def test_options_that_a_base_adds_are_those_of_the_call(site, key, order, way):
    called_at = time.time()

    assert site.tasks.tagged[order, way].delay(key).get(timeout=30) == "tagged"
    (began,) = site.journal.read(f"{key}:began")
    assert began >= called_at + 0.5


def test_a_body_whose_coroutine_a_base_runs_after_the_lock_is_an_error_in_the_log(site, key):
    task = site.tasks.runs_coroutines["before"]
    assert task.delay(key).get(timeout=30) is False  # the key is free when it runs

    message = "Task coroutines_before["
    site.workers[0].wait_log(message)
    line = next(each for each in site.log().splitlines() if message in each and "ERROR" in each)
    assert "has returned a coroutine" in line
    assert "WITHOUT the lock" in line


def test_a_base_behind_the_lock_may_run_what_a_body_returns(site, key):
    assert site.tasks.runs_coroutines["behind"].delay(key).get(timeout=30) is True
    assert "coroutines_behind[" not in [
        each for each in site.log().splitlines() if "has returned a coroutine" in each
    ]


@pytest.fixture
def sends_late(site, monkeypatch):
    """Has the app defer what its tasks send; call it to send that."""
    deferred = []
    send = site.app.send_task

    def send_task(*args, **options):
        deferred.append(lambda: send(*args, **options))

    monkeypatch.setattr(site.app, "send_task", send_task)
    return lambda: [each() for each in deferred]


def test_an_app_may_defer_what_it_sends_through_the_store(site, key, sends_late):
    for note in "abc":  # one more than there are producers
        assert site.tasks.plain.delay(f"{key}:{note}", note) is None
    results = sends_late()
    ensure_pool_is_free(site.app)

    for note, result in zip("abc", results, strict=True):
        result.get(timeout=30)
        assert site.journal.read(f"{key}:{note}") == [note]


def test_an_app_that_defers_a_call_with_an_identity_is_refused(site, key, sends_late):
    site.tasks.traced["behind", "unique"].delay(key)

    with pytest.raises(ConfigurationError, match="traced_behind_unique: with lock_unique"):
        sends_late()
    ensure_pool_is_free(site.app)


def test_batches_exclude_one_another_by_a_lock_in_their_body(site, key):
    if site.tasks.Batches is None:
        pytest.skip("celery-batches is not installed")
    for _ in range(4):
        site.tasks.batched.delay(key)
    site.journal.wait(key)
    wait_until(lambda: site.look(key).waiting == 1, what="the second batch to wait for the key")

    site.journal.open(key)

    assert site.journal.wait(key, 2) == [[2, 1], [2, 1]]
