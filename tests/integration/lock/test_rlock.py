"""`Lock` does what `threading.RLock` is documented to do: one suite over both."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.errors import (
    ConfigurationError,
    LockConflictError,
    LockError,
    LockNotOwnedError,
)
from celery_distlock.lock import Lock
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore
from tests.contract.grace import lengthen
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(params=["redis", "memory"])
def new_lock(
    request: pytest.FixtureRequest, redis_url: str, prefix: str
) -> Iterator[Callable[..., Lock]]:
    store = RedisStore(redis_url, prefix) if request.param == "redis" else None
    with closing(store or MemoryStore("memory://", prefix)) as store:
        yield lambda key="k", **options: Lock(key, store=store, **options)


@pytest.fixture(params=["RLock", "redis", "memory"])
def lock(request: pytest.FixtureRequest, redis_url: str, prefix: str) -> Iterator[Any]:
    """A lock of each kind, the standard library's among them."""
    if request.param == "RLock":
        yield threading.RLock()
        return
    store = RedisStore(redis_url, prefix) if request.param == "redis" else None
    with closing(store or MemoryStore("memory://", prefix)) as store:
        yield Lock("k", store=store)


def elsewhere(call: Callable[[], Any]) -> Any:
    """What *call* returns, or raises, in another thread."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    (result,) = outcome
    return result


def free(lock: Any) -> bool:
    """Whether another thread could take the lock."""

    def attempt() -> bool:
        taken: bool = lock.acquire(blocking=False)
        if taken:
            lock.release()
        return taken

    result: bool = elsewhere(attempt)
    return result


# What both do


def test_acquire_returns_true(lock):
    assert lock.acquire() is True
    assert not free(lock)
    lock.release()


def test_a_released_lock_is_free(lock):
    lock.acquire()
    lock.release()

    assert free(lock)


def test_the_owner_may_acquire_again(lock):
    for arguments in [{}, {"blocking": False}, {"timeout": 5}, {"timeout": 0}, {}]:
        assert lock.acquire(**arguments) is True

    for _ in range(5):
        lock.release()


def test_the_lock_is_free_after_as_many_releases_as_acquisitions(lock):
    for _ in range(3):
        lock.acquire()

    for _ in range(2):
        lock.release()
        assert not free(lock)
    lock.release()
    assert free(lock)


def test_releasing_an_unheld_lock_is_a_runtime_error(lock):
    with pytest.raises(RuntimeError):
        lock.release()


def test_releasing_once_too_often_is_a_runtime_error(lock):
    lock.acquire()
    lock.release()

    with pytest.raises(RuntimeError):
        lock.release()
    assert free(lock)


def test_another_thread_cannot_release_the_lock(lock):
    lock.acquire()

    assert isinstance(elsewhere(lock.release), RuntimeError)

    assert not free(lock)
    lock.release()


def test_a_taken_lock_is_not_waited_for_without_blocking(lock):
    lock.acquire()

    assert elsewhere(lambda: lock.acquire(False)) is False
    assert elsewhere(lambda: lock.acquire(blocking=False)) is False
    assert elsewhere(lambda: lock.acquire(0, -1)) is False
    lock.release()


def test_a_taken_lock_is_waited_for_as_long_as_the_timeout(lock):
    lock.acquire()

    def attempt():
        started = time.monotonic()
        taken = lock.acquire(timeout=0.2)
        return taken, time.monotonic() - started

    taken, took = elsewhere(attempt)

    assert taken is False
    assert 0.19 < took < 10
    lock.release()


def test_a_timeout_of_0_does_not_wait(lock):
    lock.acquire()

    assert elsewhere(lambda: lock.acquire(timeout=0)) is False
    lock.release()


def test_a_waiter_that_gave_up_does_not_block_the_queue(lock):
    lock.acquire()
    elsewhere(lambda: lock.acquire(timeout=0.05))
    lock.release()

    assert free(lock)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((False, 5), ValueError),
        ((False, 0), ValueError),
        ((False, -2), ValueError),
        ((True, -2), ValueError),
        ((True, -0.5), ValueError),
        ((True, -math.inf), (ValueError, OverflowError)),
        ((True, math.nan), ValueError),
        ((True, threading.TIMEOUT_MAX * 2), OverflowError),
        ((True, 1e100), OverflowError),
        ((True, math.inf), OverflowError),
        ((True, "5"), TypeError),
        ((True, None), TypeError),
    ],
)
def test_a_wrong_timeout_is_the_same_error(lock, arguments, error):
    with pytest.raises(error):
        lock.acquire(*arguments)

    assert free(lock)


def test_a_wrong_timeout_is_an_error_for_the_owner_too(lock):
    with lock, pytest.raises(ValueError):
        lock.acquire(False, 5)

    assert free(lock)


def test_the_longest_timeout_is_accepted(lock):
    assert lock.acquire(timeout=threading.TIMEOUT_MAX) is True
    lock.release()


def test_it_is_a_context_manager(lock):
    with lock:
        assert not free(lock)
        with lock:
            assert not free(lock)
        assert not free(lock)

    assert free(lock)


def test_the_block_releases_when_it_raises_and_the_exception_goes_on(lock):
    with pytest.raises(LookupError, match="body"), lock:
        raise LookupError("body")

    assert free(lock)


def test_leaving_a_block_whose_body_released_the_lock_is_a_runtime_error(lock):
    with pytest.raises(RuntimeError), lock:
        lock.release()


def test_a_waiting_thread_gets_the_lock_after_the_release(lock):
    lock.acquire()
    got = threading.Event()

    def wait():
        with lock:
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    assert not got.wait(0.2)

    lock.release()

    assert got.wait(30)
    thread.join(30)
    assert free(lock)


def test_a_waiting_thread_does_not_get_it_at_a_partial_release(lock):
    lock.acquire()
    lock.acquire()
    got = threading.Event()

    def wait():
        with lock:
            got.set()

    thread = threading.Thread(target=wait)
    thread.start()

    lock.release()
    assert not got.wait(0.2)

    lock.release()
    assert got.wait(30)
    thread.join(30)


def test_a_counter_that_is_not_atomic_is_right_under_the_lock(lock):
    counter = 0

    def work():
        nonlocal counter
        for _ in range(10):
            with lock:
                seen = counter
                time.sleep(0.0002)
                counter = seen + 1

    threads = [threading.Thread(target=work) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert counter == 100
    assert free(lock)


@pytest.mark.skipif(sys.version_info < (3, 14), reason="RLock has it since 3.14")
def test_locked_says_whether_it_is_held(lock):
    assert not lock.locked()
    with lock:
        assert lock.locked()


# What only ours has


def test_releasing_what_one_does_not_hold_is_a_lock_error_that_names_the_key(new_lock):
    with pytest.raises(LockNotOwnedError, match="lock 'k' is not held by this thread") as caught:
        new_lock().release()

    assert isinstance(caught.value, LockError)


def test_a_release_in_another_thread_raises_with_the_place_of_acquisition(new_lock):
    lock, errors = new_lock(), []

    def release():
        try:
            lock.release()
        except LockNotOwnedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=release)
    with lock:
        thread.start()
        thread.join(30)
    me = threading.current_thread().name
    assert errors == [
        f"lock 'k' is not held by this thread, but by '{me}': it is released where it was acquired"
    ]


def test_two_locks_of_one_key_in_one_thread_are_one_lock(new_lock):
    one, other = new_lock(), new_lock()
    one.acquire()

    assert other.acquire(blocking=False)
    assert one.lease.token == other.lease.token
    one.release()
    assert not free(new_lock())
    one.release()
    assert free(new_lock())


def test_locks_of_two_keys_are_two_locks(new_lock):
    with new_lock("k1"):
        assert free(new_lock("k2"))
        with new_lock("k2"):
            assert not free(new_lock("k1"))


def test_locks_may_be_released_in_any_order(new_lock):
    one, other = new_lock("k1"), new_lock("k2")
    one.acquire()
    other.acquire()

    one.release()

    assert free(one)
    assert not free(other)
    other.release()


def test_locked_is_true_with_any_holder(new_lock):
    lock = new_lock()
    assert lock.locked() is False

    with lock:
        assert lock.locked() is True
        assert elsewhere(new_lock().locked) is True

    assert lock.locked() is False


def test_the_lease_is_there_while_the_lock_is_held(new_lock):
    lock = new_lock(lease=20.0)
    assert lock.lease is None

    with lock as lease:
        assert lock.lease.token == lease.token > 0
        assert (lease.key, lease.held) == ("k", True)
        assert 10 < lease.remaining < 20
        lease.ensure_held()
        assert elsewhere(lambda: lock.lease) is None

    assert lock.lease is None
    assert not lease.held


def test_a_reentry_keeps_the_token_and_the_next_acquisition_raises_it(new_lock):
    lock = new_lock()
    with lock as outer, lock as inner:
        assert inner.token == outer.token
    with lock as later:
        assert later.token > outer.token


def test_tokens_rise_from_thread_to_thread(new_lock):
    tokens = []

    def work():
        for _ in range(10):
            with new_lock() as lease:
                tokens.append(lease.token)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(tokens) == 40
    assert tokens == sorted(set(tokens))


def test_the_lease_can_be_extended(new_lock):
    with new_lock(lease=5.0) as lease:
        lease.extend(100)

        assert lease.remaining > 90


def test_events_show_a_locks_life(new_lock, events):
    lock = new_lock()
    with lock as lease, lock:
        token = lease.token
        assert elsewhere(lambda: new_lock().acquire(blocking=False)) is False

    assert events.names() == ["lock_acquired", "lock_conflict", "lock_released"]
    acquired, conflict, released = (facts for _, facts in events)
    assert acquired["sender"] is lock
    assert (acquired["key"], acquired["token"]) == ("k", token)
    assert (released["key"], released["token"]) == ("k", token)
    assert conflict["holder"] == acquired["holder"] == released["holder"]
    assert 0 < conflict["remaining"] <= 30


def test_with_waits_no_longer_than_its_timeout(new_lock):
    with new_lock():
        error = elsewhere(new_lock(timeout=0.1).__enter__)

    assert isinstance(error, LockConflictError)
    assert error.key == "k"
    assert threading.current_thread().name in error.holder
    assert error.remaining > 0
    assert not new_lock().locked()
    with new_lock(timeout=0.1) as lease, new_lock(timeout=0) as again:
        assert lease.token == again.token


@pytest.mark.parametrize("timeout", [-1, math.nan, True, "3", 1e300])
def test_a_time_too_long_to_wait_is_refused(new_lock, timeout):
    with pytest.raises(ConfigurationError, match="timeout must be a number of seconds"):
        new_lock(timeout=timeout)


def test_a_store_has_its_own_prefix(new_lock):
    with pytest.raises(ConfigurationError, match="is for a store's URL"):
        new_lock(prefix="other")


def test_the_programs_random_numbers_are_left_alone(new_lock):
    # A program that has seeded them wants its own sequence, in tests above all.
    lock = new_lock()
    random.seed(7)
    state = random.getstate()

    with lock:
        elsewhere(lambda: lock.acquire(timeout=0.05))

    assert random.getstate() == state


def test_waiters_are_served_in_the_order_of_arrival(new_lock, monkeypatch):
    lengthen(monkeypatch, GRANT=30.0)  # one that comes late is not served
    lock = new_lock()
    served = []

    def wait(n):
        with lock:
            served.append(n)

    lock.acquire()
    threads = []
    for n in range(5):
        thread = threading.Thread(target=wait, args=(n,))
        thread.start()
        threads.append(thread)
        wait_until(lambda n=n: lock._store.inspect("k").waiting == n + 1, what="it to queue")
    lock.release()
    for thread in threads:
        thread.join(60)

    assert served == list(range(5))


def test_waiters_that_need_longer_than_they_are_given_are_served_all_the_same(
    new_lock, monkeypatch
):
    lengthen(monkeypatch, GRANT=0.05)
    kind = new_lock()._store.inbox("other", "nobody").__class__
    wait = kind.wait

    def wait_and_dawdle(inbox, timeout):
        wait(inbox, timeout)
        time.sleep(0.1)

    def take_turns():
        served.append(lock.acquire(timeout=20))
        if served[-1]:
            lock.release()

    monkeypatch.setattr(kind, "wait", wait_and_dawdle)
    lock, served = new_lock(), []
    lock.acquire()
    threads = [threading.Thread(target=take_turns) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: lock._store.inspect("k").waiting == 8, what="all to queue")

    lock.release()
    for thread in threads:
        thread.join(60)

    assert served == [True] * 8


def test_a_thread_that_ends_does_not_leave_its_hold_to_the_next_thread(new_lock):
    # Thread idents are used again; what was held goes with the thread that held it.
    lock = new_lock(lease=0.3, watchdog=False)
    elsewhere(lock.acquire)

    assert isinstance(elsewhere(lock.release), LockNotOwnedError)
    assert elsewhere(lambda: lock.lease) is None
    with lock:
        pass


def test_the_repr_says_whether_it_is_held(new_lock):
    lock = new_lock()
    assert repr(lock) == "<Lock 'k': not held here>"
    with lock as lease:
        assert f"token {lease.token}: " in repr(lock)


def test_a_lock_without_a_store_can_be_shown(monkeypatch):
    from celery_distlock.engine import acquisition

    monkeypatch.setattr(acquisition.defaults, "store", acquisition.no_store)

    assert "'k'" in repr(Lock("k"))


def test_without_an_app_a_store_has_to_be_named(monkeypatch):
    from celery_distlock.engine import acquisition

    monkeypatch.setattr(acquisition.defaults, "store", acquisition.no_store)

    with pytest.raises(ConfigurationError, match="name a store or a URL"):
        Lock("k").acquire()


def test_a_url_names_a_store(redis_url):
    one, other = Lock("k", store="memory://named"), Lock("k", store="memory://named")

    with one:
        assert not free(other)
        assert other.lease is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"key": ""}, "a non-empty text"),
        ({"key": b"k"}, "a non-empty text"),
        ({"key": None}, "a non-empty text"),
        ({"lease": 0}, "lease must be a number of seconds from 0.1"),
        ({"lease": -1}, "lease must be"),
        ({"lease": 0.05}, "lease must be"),
        ({"lease": math.nan}, "lease must be"),
        ({"lease": math.inf}, "lease must be"),
        ({"lease": "30"}, "lease must be"),
        ({"lease": True}, "lease must be"),
        ({"lease": None}, "lease must be"),
        ({"watchdog": 1}, "watchdog must be True or False"),
        ({"watchdog": None}, "watchdog must be True or False"),
        ({"store": 7}, "store must be a URL such as .* or None, not a builtins.int"),
        ({"store": "valkey://localhost"}, "the URL of a Valkey begins with redis://"),
        ({"store": "valkeys://localhost"}, "the URL of a Valkey begins with rediss://"),
        ({"store": "nosuch://"}, "no lock store"),
        ({"prefix": ""}, "a prefix must be a text"),
        ({"prefix": 0}, "a prefix must be a text"),
    ],
)
def test_a_wrong_argument_is_refused_at_once(arguments, said):
    with pytest.raises(ConfigurationError, match=said):
        Lock(**{"key": "k", "store": "memory://", **arguments})


def test_an_argument_of_other_locks_is_refused_by_the_name_of_this_one():
    with pytest.raises(TypeError, match=r"^Lock\.__init__\(\) got .* 'blocking'"):
        Lock("k", store="memory://", blocking=False)


def test_only_the_key_is_positional():
    with pytest.raises(TypeError):
        Lock("k", 30.0)  # type: ignore[misc]
