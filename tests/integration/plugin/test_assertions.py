from __future__ import annotations

import threading
import uuid
from contextlib import contextmanager

import pytest

from celery_distlock import Key, Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.values import ParkRequest, Status
from celery_distlock.testing import assert_free, assert_locked, assert_parked, assert_units
from tests.waiting import wait_until

ENVELOPE = b'{"headers": {"task": "shop.reserve"}}'


@pytest.fixture(params=["memory", "redis"])
def store(request, prefix, redis_url):
    store = open_store(f"memory://{prefix}" if request.param == "memory" else redis_url, prefix)
    yield store
    store.close()


@contextmanager
def held(store, key="k"):
    owner = new_owner("shop.reserve[42]")
    assert store.acquire(AcquireRequest(key, owner, 30.0, run="42:0:0:0")).status is Status.GRANTED
    yield
    store.release(ReleaseRequest(key, owner, run="42:0:0:0"))


def park(store, task_id, key="k"):
    owner, run = new_owner("shop.reserve"), f"{task_id}:0:0:0"
    park_request = ParkRequest(b"", task="shop.reserve")
    assert (
        store.acquire(AcquireRequest(key, owner, 30.0, queue=park_request, run=run)).status
        is Status.PARKED
    )


def message(check, *args, **kwargs) -> str:
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


def test_what_is_so_is_let_pass(store):
    assert_free("k", store)
    with held(store):
        assert_locked("k", store)
        park(store, "43")
        assert_parked("43", store=store)
        assert_parked("43", "k", store)


def test_a_key_may_be_named_with_its_terms_as_a_task_reports_it(store):
    key = Key("k", capacity=5, weight=2)
    assert_free(key, store)
    with Lock(key, store=store):
        assert_locked(key, store)
        assert_units(key, 2, store)
        park(store, "43")
        assert_parked("43", key, store)


def test_not_free_names_holder_start_and_waiters(store):
    with held(store):
        park(store, "43")
        said = message(assert_free, "k", store)

    assert said.startswith("'k' is not free: shop.reserve[42] (pid ")
    assert " holds it since " in said
    assert " s left; waiting: shop.reserve[43] (parked since " in said


def test_not_locked_reports_that_there_is_no_holder(store):
    assert message(assert_locked, "k", store) == ("'k' is not locked: it has no holder; no waiters")


def test_units_in_use_are_counted(store):
    assert_units("k", 0, store)
    with Lock("k", store=store, capacity=5, weight=2):
        assert_units("k", 2, store)
        assert_locked("k", store)

        said = message(assert_units, "k", 3, store)

    assert said.startswith("not 3 units of 'k' in use, 2 are: 2 of 5 units are held, by MainThread")
    assert ", 2 units, token " in said
    assert said.endswith("; no waiters")


def test_a_key_that_is_held_alone_has_no_units_in_use(store):
    with held(store):
        said = message(assert_units, "k", 1, store)

    assert said.startswith("not 1 unit of 'k' in use, it is held exclusively: shop.reserve[42] (")


def test_a_resting_key_is_not_free_and_has_no_holder(store):
    with Lock(Key("k", min_hold=60), store=store):
        pass

    assert message(assert_free, "k", store).startswith("'k' is not free: it rests since ")


def test_a_blocked_waiter_is_named(store):
    with held(store):
        lock = Lock("k", store=store)
        thread = threading.Thread(target=lock.acquire, kwargs={"timeout": 30}, name="the-web")
        thread.start()
        wait_until(lambda: store.inspect("k").waiting)
        said = message(assert_free, "k", store)
        not_parked = message(assert_parked, "43", "k", store)
    thread.join()

    assert "; waiting: the-web (pid " in said
    assert not_parked.startswith("task 43 is not parked at 'k': shop.reserve[42] (pid ")


def test_many_that_wait_are_counted(store):
    with held(store):
        for task_id in range(120):
            park(store, f"task-{task_id}")
        said = message(assert_free, "k", store)
        assert_parked("task-119", "k", store)

    assert said.count("(parked since ") == 5
    assert said.endswith(" and 115 more")


def test_a_woken_run_is_not_parked_now(store):
    with held(store):
        park(store, "43")

    said = message(assert_parked, "43", "k", store)
    assert said.startswith(
        "task 43 is not parked at 'k': it is reserved for the woken task 43 since "
    )
    assert "; waiting: shop.reserve[43] (woken since " in said
    assert message(assert_parked, "43", store=store).startswith("task 43 is not parked: ")


def test_another_task_is_not_taken_for_the_one_asked_for(store):
    with held(store):
        park(store, "43")
        park(store, "4:3")
        assert_parked("4:3", "k", store)

        assert "is not parked at 'k'" in message(assert_parked, "4", "k", store)


def test_it_may_come_true_within_a_time(store):
    with held(store):
        over = threading.Timer(0.1, store.release, [ReleaseRequest("other", "nobody")])
        over.start()
        over.join()
        owner = new_owner("late")
        late = threading.Timer(0.2, store.acquire, [AcquireRequest("late", owner, 30.0)])
        late.start()
        assert_locked("late", store, within=30)
        late.join()
    store.release(ReleaseRequest("late", owner))


def test_a_url_names_a_store(redis_url):
    assert_free(f"k-{uuid.uuid4().hex}", redis_url)


def test_a_task_is_parked_at_a_key_that_is_named(run_tests):
    outcome = run_tests("""
        def test_key(distlock_memory):
            distlock_memory.assert_parked(reserve)

        def test_not_parked(distlock_memory):
            with distlock_memory.hold("k"):
                distlock_memory.assert_parked(reserve, "k")
    """)

    assert outcome.counts == {"failed": 2}
    assert outcome.says("TypeError: assert_parked.*needs the key, or the id of one call")
    assert outcome.says("task shop.reserve is not parked at 'k': the-test .*; no waiters")


def test_a_failure_points_at_the_test_s_own_line(run_tests):
    outcome = run_tests("""
        def test_free(distlock_memory):
            with distlock_memory.hold("k"):
                distlock_memory.assert_free("k")
    """)

    assert outcome.counts == {"failed": 1}
    assert "assertions.py" not in outcome.output
    assert outcome.says(r">\s+distlock_memory.assert_free\(\"k\"\)")
