"""What a task sees of the lock that it holds."""

from __future__ import annotations

import threading

import pytest

from celery_distlock.errors import LockLostError, LockNotOwnedError
from celery_distlock.stores.redis.connections import ConnectionPool
from tests.waiting import wait_until

SHARED = True


def test_a_task_sees_its_lease(site, key):
    seen = site.tasks.look.delay(key).get(timeout=30)

    assert seen["key"] == key
    assert seen["keys"] == [key]
    assert seen["held"]
    assert 0 < seen["remaining"] <= site.tasks.LEASE
    assert type(seen["token"]) is int


def test_tokens_rise_over_the_grants_of_all_processes(site, key):
    looks = [site.tasks.look.delay(key) for _ in range(20)]
    seen = [result.get(timeout=30) for result in looks]
    with site.lock(key) as lease:
        last = lease.token

    tokens = [look["token"] for look in seen]
    assert len(set(tokens)) == 20
    assert last > max(tokens)


def test_a_list_of_templates_is_held_as_a_whole(site, key):
    assert site.tasks.look_at_two.delay(key).get(timeout=30) == [f"a:{key}", f"b:{key}"]


def test_two_free_keys_are_taken_in_one_round_trip(site, key, monkeypatch):
    site.tasks.look_at_two(key)  # now the server has the scripts
    asked = []
    exchange = ConnectionPool.exchange

    def note(*words):
        asked.append(threading.current_thread())
        return exchange(*words)

    monkeypatch.setattr(ConnectionPool, "exchange", note)

    assert site.tasks.look_at_two(key) == [f"a:{key}", f"b:{key}"]

    # Each is given up by itself. Other threads may count, or renew, in between.
    assert asked.count(threading.current_thread()) == 1 + 2


@pytest.mark.parametrize("taken", ["a", "b"])
def test_a_task_of_two_keys_waits_for_either(site, key, taken):
    with site.held(f"{taken}:{key}"):
        result = site.tasks.look_at_two.delay(key)
        site.wait_queued(f"{taken}:{key}")
        site.wait_free(f"{'ba'['ab'.index(taken)]}:{key}")  # holds neither while it waits

    assert result.get(timeout=30) == [f"a:{key}", f"b:{key}"]


def test_a_task_of_two_keys_that_waits_for_one_after_the_other_runs(site, key):
    with site.held(f"b:{key}"):
        with site.held(f"a:{key}"):
            result = site.tasks.look_at_two.delay(key)
            site.wait_queued(f"a:{key}")
        site.wait_queued(f"b:{key}")
        site.wait_free(f"a:{key}")

    assert result.get(timeout=30) == [f"a:{key}", f"b:{key}"]


def test_tasks_with_crossed_keys_do_not_wait_for_each_other(site, key):
    results = [site.tasks.look_at_two.delay(key) for _ in range(10)]

    for result in results:
        result.get(timeout=60)


def test_a_lease_is_extended(site, key):
    result = site.tasks.extend.delay(key, 60.0, key)
    (remaining,) = site.journal.wait(key)

    assert 50 < remaining <= 60
    assert 50 < site.look(key).remaining <= 60
    site.journal.open(key)
    assert result.get(timeout=30) > 50
    site.wait_free(key)


def test_there_is_no_lease_outside_of_the_task(site):
    lease = site.tasks.look.lock

    assert (bool(lease), lease.keys, lease.token, lease.held) == (False, (), 0, False)
    with pytest.raises(LockNotOwnedError):
        lease.ensure_held()


def test_a_key_of_none_means_unlocked(site, key):
    assert site.tasks.run_unlocked.delay(key).get(timeout=30)


def test_a_task_reenters_its_own_lock(site, key):
    tokens = site.tasks.call_itself.delay(key, 3).get(timeout=30)

    assert len(tokens) == 4
    assert len(set(tokens)) == 1
    site.wait_free(key)


def test_a_task_reenters_its_lock_by_every_way(site, key):
    seen = site.tasks.call_others.delay(key).get(timeout=30)

    assert seen == {"direct": True, "apply": True, "lock": True, "still held": True}
    site.wait_free(key)


def test_an_inner_call_with_another_key_takes_that_too(site, key):
    result = site.tasks.call_with_another_key.delay(key, f"{key}:other")

    assert result.get(timeout=30) == "inner"
    site.wait_free(key)
    site.wait_free(f"{key}:other")


def test_an_inner_call_whose_key_is_taken_raises_and_parks_nothing(site, key):
    other = f"{key}:other"
    with site.held(other):
        result = site.tasks.call_with_another_key.delay(key, other)

        assert result.get(timeout=30) == f"conflict at {other}"
        assert site.look(other).waiting == 0

    assert site.journal.read(key) == [key]
    assert site.journal.read(other) == []


def test_an_inner_call_of_what_runs_unlocked_raises_and_parks_nothing_either(site, key):
    with site.held(key):
        result = site.tasks.call_for_a_part.delay(key)

        assert result.get(timeout=30) == f"conflict at {key}"
        assert site.look(key).waiting == 0

    assert site.tasks.call_for_a_part.delay(key).get(timeout=30) == "inner"
    assert site.journal.read(key) == [False, False]


# Losing it


@pytest.mark.parametrize("name", ["sleep_long", "turn_long"])
def test_a_task_that_loses_its_lock_is_aborted(site, key, name):
    result = getattr(site.tasks, name).delay(key)
    (token,) = site.journal.wait(key)

    site.forget(key)
    with pytest.raises(LockLostError) as caught:
        result.get(timeout=20 * site.tasks.LEASE)

    assert result.state == "FAILURE"
    assert caught.value.key == key
    assert caught.value.token == token


def test_a_task_whose_key_another_holds_is_aborted_and_leaves_it_alone(site, key):
    result = site.tasks.sleep_long.delay(key)
    (token,) = site.journal.wait(key)

    site.forget(key)
    with site.lock(key) as lease:
        with pytest.raises(LockLostError):
            result.get(timeout=20 * site.tasks.LEASE)

        assert lease.token > token
        assert site.look(key).token == lease.token


def test_a_task_may_catch_the_loss_and_finish(site, key):
    result = site.tasks.catch_loss.delay(key)
    (token,) = site.journal.wait(key)

    site.forget(key)

    assert result.get(timeout=20 * site.tasks.LEASE) == {"key": key, "token": token, "held": False}


def test_a_worker_works_on_after_an_abort(site, key):
    aborted = [site.tasks.sleep_long.delay(f"{key}:{number}") for number in range(4)]
    for number in range(4):
        site.journal.wait(f"{key}:{number}")
        site.forget(f"{key}:{number}")
    for result in aborted:
        with pytest.raises(LockLostError):
            result.get(timeout=30)

    again = [site.tasks.look.delay(f"{key}:{number}") for number in range(4)]

    for result in again:
        assert result.get(timeout=30)["held"]


def test_a_task_that_loses_its_lock_goes_back_to_the_end_of_its_queue_if_configured(site, key):
    result = site.tasks.begin_again.delay(key, key)
    site.journal.wait(key)
    other = site.tasks.work_requeue.delay(key, "other", f"{key}:other")
    site.wait_queued(key)

    site.forget(key)
    wait_until(lambda: result.state == "PARKED", what="the task to be parked")
    site.journal.open(f"{key}:other")
    assert other.get(timeout=30) == 0
    site.journal.wait(key, 3)
    site.journal.open(key)

    assert result.get(timeout=30) == "done"
    assert site.journal.read(key) == ["begun", "other", "begun"]


def test_a_task_goes_back_no_more_often_than_it_may(site, key):
    result = site.tasks.begin_again.delay(key, key)
    for begun in (1, 2):
        site.journal.wait(key, begun)
        site.wait_held(key)
        site.forget(key)

    with pytest.raises(LockLostError):
        result.get(timeout=30)
    assert site.journal.read(key) == ["begun", "begun"]


def test_with_warn_a_task_that_loses_its_lock_finishes(site, key):
    result = site.tasks.ignore_loss.delay(f"watched-{key}", key)
    (token,) = site.journal.wait(f"watched-{key}")

    site.forget(f"watched-{key}")
    message = f"lost its lock 'watched-{key}' (token {token}): the store no longer knows it"
    wait_until(lambda: message in site.log(), what="the loss to be logged")
    site.journal.open(key)

    assert result.get(timeout=30) is False

    def signals() -> list[str]:
        return [note["name"] for note in site.journal.read(f"signals:watched-{key}")]

    wait_until(lambda: "lock_lost" in signals(), what="the signal, which comes after the log")


@pytest.mark.parametrize("name", ["sleep_without_watchdog", "sleep_beyond_max_hold"])
def test_a_lease_that_is_not_renewed_ends(site, key, name):
    result = getattr(site.tasks, name).delay(key)
    other = site.tasks.work_requeue.delay(key)

    with pytest.raises(LockLostError):
        result.get(timeout=30)

    assert other.get(timeout=30) == 0


@pytest.mark.parametrize("next_one", [False, True], ids=["alone", "before another"])
def test_a_task_in_c_code_for_three_leases_keeps_its_key(site, key, next_one):
    seconds = 3.5 * site.tasks.LEASE
    result = site.tasks.keep_on.delay(key, seconds)
    (token,) = site.journal.wait(key)
    other = site.tasks.look.delay(key) if next_one else None

    seen = result.get(timeout=30)
    assert seen["token"] == token
    assert 0 < seen["remaining"] < site.tasks.LEASE
    if other is not None:
        assert other.get(timeout=30)["token"] > token


@pytest.mark.parametrize("name", ["keep_on_unwatched", "keep_on_for_a_lease"])
def test_a_task_that_is_not_to_be_renewed_is_not_in_c_code_either(site, key, name):
    result = getattr(site.tasks, name).delay(key, 3.5 * site.tasks.SHORT_LEASE)
    site.journal.wait(key)

    with pytest.raises(LockLostError):
        result.get(timeout=30)


def test_what_a_thread_has_left_locked_is_free_though_its_process_lives(site, key):
    other = f"{key}-other"
    result = site.tasks.abandon.delay(key, other)
    site.journal.wait(key)

    site.wait_free(other)

    assert result.state != "SUCCESS"
    site.journal.open(key)
    result.get(timeout=30)
