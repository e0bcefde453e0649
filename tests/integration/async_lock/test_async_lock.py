"""`AsyncLock` does what `asyncio.Lock` is documented to do, with an owner, as `RLock` has one."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from celery_distlock import AsyncLock, Lock
from celery_distlock.errors import (
    ConfigurationError,
    LockConflictError,
    LockNotOwnedError,
    StoreUnavailableError,
)
from celery_distlock.stores import open_store
from tests.integration.async_lock.conftest import in_a_moment, is_as_new


def test_it_is_held_in_its_block_and_free_after_it(new_lock, store):
    async def main():
        lock = new_lock()
        async with lock as lease:
            assert lease.held
            assert lease.token == store.inspect("k").token
            assert lock.lease.token == lease.token
            assert await lock.locked()
        assert not lease.held
        assert lock.lease is None
        assert not await lock.locked()

    asyncio.run(main())


def test_tokens_rise(new_lock):
    async def main():
        tokens = []
        for _ in range(10):
            async with new_lock() as lease:
                tokens.append(lease.token)
        assert tokens == sorted(set(tokens))

    asyncio.run(main())


def test_a_request_that_does_not_wait_is_answered_at_once(new_lock):
    async def main():
        lock = new_lock()
        assert await lock.acquire(timeout=0) is True
        assert await asyncio.create_task(acquire_for(new_lock(), 0)) is False
        await lock.release()
        assert await lock.acquire(timeout=0) is True
        await lock.release()

    asyncio.run(main())


def test_the_block_names_the_holder_when_its_time_was_over(new_lock, store):
    async def enter():
        async with new_lock(timeout=0.05):
            pytest.fail("two have the key")

    async def main():
        async with new_lock():
            owner = store.inspect("k").owner
            with pytest.raises(LockConflictError) as caught:
                await asyncio.create_task(enter())
        assert caught.value.holder == owner
        assert caught.value.key == "k"

    asyncio.run(main())
    assert is_as_new(store)


def test_a_wait_with_a_timeout_has_left_no_place_in_the_queue(new_lock, store):
    async def main():
        async with new_lock():
            waiter = asyncio.create_task(acquire_for(new_lock(), 0.2))
            await in_a_moment(lambda: store.inspect("k").waiting == 1)
            assert await waiter is False
            assert store.inspect("k").waiting == 0

    asyncio.run(main())


async def acquire_for(lock: AsyncLock, timeout: float) -> bool:
    return await lock.acquire(timeout)


def test_one_after_the_other_counts_right(new_lock):
    counted = 0

    async def count():
        nonlocal counted
        for _ in range(5):
            async with new_lock():
                seen = counted
                await asyncio.sleep(0)
                counted = seen + 1

    async def main():
        await asyncio.gather(*(count() for _ in range(20)))

    asyncio.run(main())
    assert counted == 100


def test_waiters_have_it_in_the_order_of_their_requests(new_lock):
    order = []

    async def enter(number):
        async with new_lock():
            order.append(number)

    async def main():
        async with new_lock():
            waiters = [asyncio.create_task(enter(number)) for number in range(50)]
            await asyncio.sleep(0)
        await asyncio.gather(*waiters)

    asyncio.run(main())
    assert order == list(range(50))


def test_a_task_enters_again_what_it_has(new_lock, store):
    async def main():
        lock, other = new_lock(), new_lock()
        async with lock as outer:
            async with other as inner:
                assert inner.token == outer.token
            assert await other.acquire()
            await other.release()
            assert store.inspect("k").token == outer.token
        assert is_as_new(store)

    asyncio.run(main())


def test_a_task_that_it_starts_does_not_enter_it(new_lock):
    async def main():
        lock = new_lock()
        async with lock:
            assert await asyncio.create_task(acquire_for(lock, 0.05)) is False
            assert await asyncio.create_task(lease_of(lock)) is None

    async def lease_of(lock):
        return lock.lease

    asyncio.run(main())


def test_it_is_not_released_by_another_task(new_lock):
    async def main():
        lock = new_lock()
        async with lock as lease:
            with pytest.raises(LockNotOwnedError, match="not held by this task"):
                await asyncio.create_task(release(lock))
            assert lease.held
        with pytest.raises(RuntimeError):
            await lock.release()

    async def release(lock):
        await lock.release()

    asyncio.run(main())


def test_the_caller_of_acquire_is_the_owner_though_another_task_awaits_it(new_lock, store):
    """As in `asyncio.wait_for`, which starts a task for that in Python 3.11."""

    async def main():
        lock = new_lock()
        assert await asyncio.wait_for(lock.acquire(), 10)
        assert lock.lease.held
        await asyncio.wait_for(lock.release(), 10)
        assert await asyncio.create_task(lock.acquire())
        assert lock.lease.held
        await lock.release()
        assert is_as_new(store)

    asyncio.run(main())


def test_a_lock_of_a_thread_and_of_a_task_exclude_each_other(new_lock, store):
    async def main():
        lock = Lock("k", store=store)
        async with new_lock():
            assert await asyncio.to_thread(lock.acquire, timeout=0.1) is False
        done, held = threading.Event(), threading.Event()

        def hold():
            with lock:
                held.set()
                done.wait(30)

        thread = asyncio.create_task(asyncio.to_thread(hold))
        await asyncio.to_thread(held.wait, 30)
        assert await new_lock().acquire(0.1) is False
        waiter = asyncio.create_task(acquire_for(new_lock(), 30))
        await in_a_moment(lambda: store.inspect("k").waiting == 1)
        done.set()
        assert await waiter
        await thread

    asyncio.run(main())


def test_a_counter_is_right_under_locks_of_both_kinds(new_lock, store):
    counted = 0

    def count_in_a_thread():
        nonlocal counted
        for _ in range(20):
            with Lock("k", store=store):
                seen = counted
                threading.Event().wait(0.0001)
                counted = seen + 1

    async def count():
        nonlocal counted
        for _ in range(20):
            async with new_lock():
                seen = counted
                await asyncio.sleep(0.0001)
                counted = seen + 1

    async def main():
        threads = [asyncio.to_thread(count_in_a_thread) for _ in range(3)]
        await asyncio.gather(*threads, *(count() for _ in range(5)))

    asyncio.run(main())
    assert counted == 160


def test_a_generator_that_is_closed_releases_what_it_took(new_lock, store):
    async def numbers():
        async with new_lock():
            yield 1
            yield 2

    async def main():
        generator = numbers()
        assert await anext(generator) == 1
        assert store.inspect("k").token
        await generator.aclose()
        assert is_as_new(store)

    asyncio.run(main())


def test_other_keys_are_other_locks(new_lock):
    async def main():
        async with new_lock("a"), new_lock("b"):
            assert await asyncio.create_task(acquire_for(new_lock("c"), 0))

    asyncio.run(main())


def test_an_error_in_the_block_is_what_is_raised(new_lock, store):
    async def main():
        with pytest.raises(ZeroDivisionError):
            async with new_lock():
                raise ZeroDivisionError

    asyncio.run(main())
    assert is_as_new(store)


def test_a_lease_of_its_own_length_and_without_a_watchdog_ends(new_lock, store):
    async def main():
        lock = new_lock(lease=0.2, watchdog=False, on_lost="warn")
        await lock.acquire()
        await in_a_moment(lambda: not lock.lease.held)

    asyncio.run(main())


def test_a_lease_is_renewed_though_the_event_loop_is_blocked(new_lock, store):
    async def main():
        async with new_lock(lease=1.5) as lease:
            threading.Event().wait(3.5)
            assert lease.held
            assert store.inspect("k").token == lease.token

    asyncio.run(main())


def test_a_lease_is_extended_in_a_thread(new_lock):
    async def main():
        async with new_lock(lease=5.0) as lease:
            await asyncio.to_thread(lease.extend, 60)
            assert lease.remaining > 50

    asyncio.run(main())


def test_a_task_that_ends_with_the_lock_is_renewed_no_more(new_lock, store):
    async def main():
        task = asyncio.create_task(new_lock(lease=3.0).acquire())  # of this task
        other = asyncio.create_task(leak())
        await asyncio.gather(task, other)
        await in_a_moment(lambda: not store.inspect("other").token)
        assert other.done()  # it is still there
        assert store.inspect("k").token  # its owner is

    async def leak():
        await new_lock("other", lease=0.6).acquire()

    asyncio.run(main())
    gc.collect()


def test_without_a_task_there_is_no_owner(new_lock):
    lock = new_lock()
    with pytest.raises(RuntimeError, match="asyncio task"):
        lock.acquire()
    with pytest.raises(RuntimeError, match="asyncio task"):
        lock.release()


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": ""},
        {"key": None},
        {"key": b"k"},
        {"lease": 0},
        {"lease": "30"},
        {"watchdog": 1},
        {"timeout": -1},
        {"store": 7},
        {"prefix": "p"},
    ],
)
def test_it_refuses_what_lock_refuses_in_the_same_words(arguments):
    given = {"key": "k", **arguments}
    with pytest.raises(ConfigurationError) as of_lock:
        Lock(**given)
    with pytest.raises(ConfigurationError) as caught:
        AsyncLock(**given)
    assert str(caught.value) == str(of_lock.value).replace("Lock()", "AsyncLock()")


@pytest.mark.parametrize(
    ("on_lost", "hint"), [("cancle", "did you mean 'cancel'"), (None, "cancel, warn")]
)
def test_what_becomes_of_a_loss_has_two_names(on_lost, hint):
    with pytest.raises(ConfigurationError, match=hint):
        AsyncLock("k", store="memory://", on_lost=on_lost)


@pytest.mark.parametrize("timeout", [-1, float("nan"), "1", True])
def test_a_timeout_is_a_number_of_seconds(new_lock, timeout):
    async def main():
        with pytest.raises(ValueError, match="timeout must be"):
            await new_lock().acquire(timeout)

    asyncio.run(main())


def test_an_endless_timeout_is_none(new_lock):
    async def main():
        assert await new_lock().acquire(float("inf"))

    asyncio.run(main())


def test_its_text_says_whether_it_is_held(new_lock):
    async def main():
        lock = new_lock()
        assert repr(lock) == "<AsyncLock 'k': not held here>"
        async with lock as lease:
            assert repr(lock) == f"<AsyncLock 'k': {lease!r}>"

    asyncio.run(main())


def test_people_see_the_tasks_name(new_lock, store):
    async def main():
        asyncio.current_task().set_name("restock")
        async with new_lock():
            assert "|restock|" in store.inspect("k").owner

    asyncio.run(main())


def test_a_store_that_does_not_answer_is_unavailable():
    async def main():
        lock = AsyncLock("k", store="redis://127.0.0.1:1/0")
        for attempt in (lock.acquire(), lock.acquire(timeout=0), lock.locked()):
            with pytest.raises(StoreUnavailableError):
                await attempt

    asyncio.run(main())


def test_a_store_may_be_a_url(redis_url, prefix):
    async def main():
        async with AsyncLock("k", store=redis_url, prefix=prefix) as lease:
            assert open_store(redis_url, prefix).inspect("k").token == lease.token

    asyncio.run(main())
