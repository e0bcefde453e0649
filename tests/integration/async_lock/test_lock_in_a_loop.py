"""`Lock` in coroutines: it works, it blocks and says so, and no two of them are one owner."""

from __future__ import annotations

import asyncio
import warnings

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockConflictError, LockError, LockNotOwnedError
from tests.integration.async_lock.conftest import in_a_moment, is_as_new


@pytest.fixture
def blocking_lock(store):
    """A `Lock` whose warning is expected."""

    def make(key="k", **options):
        return Lock(key, store=store, **options)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Lock\('\w+'\) blocks the event loop", RuntimeWarning)
        yield make


def test_a_lock_in_a_loop_warns_where_it_is_taken_and_names_the_other_one(store):
    async def main():
        lock = Lock("k", store=store)
        with pytest.warns(RuntimeWarning, match="blocks the event loop.*use AsyncLock") as caught:
            lock.acquire()
        lock.acquire()  # nothing is waited for, so nothing is said
        lock.release()
        lock.release()
        with pytest.warns(RuntimeWarning) as entered, lock:
            pass
        assert {each.filename for each in (*caught, *entered)} == {__file__}

    asyncio.run(main())
    with Lock("k", store=store):
        pass


def test_two_coroutines_do_not_enter_one_anothers_lock(blocking_lock):
    async def main():
        with blocking_lock() as lease:
            assert await asyncio.create_task(attempt()) is False
            with blocking_lock() as again:
                assert again.token == lease.token

    async def attempt():
        return blocking_lock().acquire(timeout=0.05)

    asyncio.run(main())


def test_a_lock_that_would_wait_for_a_task_of_its_own_loop_for_ever_is_refused(
    blocking_lock, new_lock, store
):
    async def main():
        async with new_lock():
            with pytest.raises(LockError, match=r"another task of this event loop.*use AsyncLock"):
                await asyncio.create_task(block())
        assert await asyncio.create_task(block()) is True
        assert is_as_new(store)

    async def block():
        with blocking_lock() as lease:
            return lease.held

    asyncio.run(main())


def test_a_task_is_one_owner_for_locks_of_both_kinds(blocking_lock, new_lock, store):
    async def main():
        async with new_lock() as lease:
            with blocking_lock() as inner:
                assert inner.token == lease.token
            assert lease.held
        with blocking_lock() as lease:
            async with new_lock() as inner:
                assert inner.token == lease.token
            assert lease.held
        assert is_as_new(store)

    asyncio.run(main())


def test_it_is_not_released_by_another_coroutine(blocking_lock):
    async def main():
        lock = blocking_lock()
        with lock:
            with pytest.raises(LockNotOwnedError, match="not held by this task"):
                await asyncio.create_task(release(lock))
            with pytest.raises(LockNotOwnedError, match="not held by this thread"):
                await asyncio.to_thread(lock.release)

    async def release(lock):
        lock.release()

    asyncio.run(main())


def test_a_callback_of_the_loop_acts_for_the_thread(store):
    async def main():
        called = asyncio.get_running_loop().create_future()

        def call():
            with Lock("k", store=store) as lease:
                called.set_result(lease.token)

        asyncio.get_running_loop().call_soon(call)
        assert await called

    asyncio.run(main())


class TestUnderALockThatTheThreadHoldsAroundTheLoop:
    """As in a locked task whose body calls `asyncio.run`."""

    def test_a_coroutine_enters_it(self, store, new_lock, blocking_lock):
        async def main():
            async with new_lock() as inner:
                assert inner.token == lease.token
                with blocking_lock() as innermost:
                    assert innermost.token == lease.token
            with blocking_lock() as inner:
                assert inner.token == lease.token

        with Lock("k", store=store) as lease:
            asyncio.run(main())
            assert lease.held
            assert store.inspect("k").token == lease.token
        assert is_as_new(store)

    def test_its_tasks_enter_one_after_the_other(self, store, new_lock):
        order, inside = [], 0

        async def enter(number):
            nonlocal inside
            async with new_lock():
                inside += 1
                assert inside == 1
                order.append(number)
                await asyncio.sleep(0.001)
                inside -= 1

        async def main():
            await asyncio.gather(*(enter(number) for number in range(30)))

        with Lock("k", store=store) as lease:
            asyncio.run(main())
            assert lease.held
        assert order == list(range(30))
        assert is_as_new(store)

    def test_a_waiter_for_its_turn_may_give_up(self, store, new_lock):
        async def main():
            async with new_lock():
                assert await asyncio.create_task(attempt(0)) is False
                assert await asyncio.create_task(attempt(0.05)) is False
                with pytest.raises(LockConflictError, match="held by"):
                    await asyncio.create_task(enter())
                waiters = [asyncio.create_task(attempt(60)) for _ in range(3)]
                await asyncio.sleep(0.01)
                waiters[0].cancel()
            waiters[1].cancel()  # which was, or was not, called
            assert await waiters[2] is True

        async def attempt(timeout):
            return await new_lock().acquire(timeout)

        async def enter():
            async with new_lock(timeout=0.05):
                pytest.fail("two have the turn")

        with Lock("k", store=store) as lease:
            asyncio.run(main())
            assert lease.held
        assert is_as_new(store)  # what the last of them did not release counts no more

    def test_another_thread_has_to_wait(self, store, new_lock):
        async def main():
            async with new_lock():
                assert not await asyncio.to_thread(Lock("k", store=store).acquire, timeout=0.05)

        with Lock("k", store=store):
            asyncio.run(main())


def test_locks_of_both_kinds_wait_side_by_side_in_a_loop(store, new_lock):
    """A thread's Lock in the queue between two tasks of a loop."""
    order = []

    async def enter(name):
        async with new_lock():
            order.append(name)

    def enter_in_a_thread(name):
        with Lock("k", store=store):
            order.append(name)

    async def main():
        async with new_lock():
            second = asyncio.to_thread(enter_in_a_thread, "second")
            tasks = []
            for call in (enter("first"), second, enter("third")):
                tasks.append(asyncio.create_task(call))
                await in_a_moment(lambda: store.inspect("k").waiting == len(tasks))
        await asyncio.gather(*tasks)

    asyncio.run(main())
    assert order == ["first", "second", "third"]
