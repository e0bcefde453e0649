"""A cancelled task, wherever that happens, leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
from itertools import count

import anyio
import pytest

from celery_distlock import Lock
from celery_distlock.stores import ReleaseRequest
from tests.integration.async_lock.conftest import in_a_moment, is_as_new
from tests.waiting import wait_until


async def hold(lock, held=None):
    async with lock:
        if held is not None:
            held.set()
        await asyncio.sleep(60)


async def cancel(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_waiter_leaves_the_queue(new_lock, store):
    async def main():
        async with new_lock() as lease:
            waiters = [asyncio.create_task(hold(new_lock())) for _ in range(5)]
            await in_a_moment(lambda: store.inspect("k").waiting == 5)
            await cancel(waiters[2])
            await in_a_moment(lambda: store.inspect("k").waiting == 4)
            assert lease.held
            for each in waiters:
                each.cancel()
            await in_a_moment(lambda: store.inspect("k").waiting == 0)
        assert not await new_lock().locked()

    asyncio.run(main())


def test_its_holder_releases_it(new_lock, store):
    async def main():
        held = asyncio.Event()
        task = asyncio.create_task(hold(new_lock(), held))
        await held.wait()
        await cancel(task)
        assert is_as_new(store)

    asyncio.run(main())


def test_a_grant_that_comes_with_the_cancellation_is_given_back(new_lock, store):
    async def main():
        lock = new_lock()
        await lock.acquire()
        waiter = asyncio.create_task(hold(new_lock()))
        await in_a_moment(lambda: store.inspect("k").waiting == 1)
        await asyncio.to_thread(release_behind_the_back, store)
        waiter.cancel()  # before the loop has heard of the push
        with pytest.raises(asyncio.CancelledError):
            await waiter
        await in_a_moment(lambda: is_as_new(store))

    def release_behind_the_back(store):
        store.release(ReleaseRequest("k", store.inspect("k").owner))

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(12))
def test_a_cancelled_acquire_leaves_nothing_after_any_number_of_turns(new_lock, store, turns):
    async def main():
        task = asyncio.create_task(hold(new_lock()))
        for _ in range(turns):
            await asyncio.sleep(0)
        await cancel(task)
        await in_a_moment(lambda: is_as_new(store))

    asyncio.run(main())
    wait_until(lambda: is_as_new(store))


@pytest.mark.parametrize("turns", range(8))
def test_a_cancelled_release_releases(new_lock, store, turns):
    async def main():
        lock = new_lock()
        entered, leave = asyncio.Event(), asyncio.Event()

        async def enter_and_leave():
            async with lock:
                entered.set()
                await leave.wait()

        task = asyncio.create_task(enter_and_leave())
        await entered.wait()
        leave.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await in_a_moment(lambda: is_as_new(store))

    asyncio.run(main())


def test_a_wait_that_is_timed_out_from_outside_leaves_nothing(new_lock, store):
    async def main():
        async with new_lock():
            for attempt in (wait_for, timeout, move_on):
                await asyncio.create_task(attempt(new_lock()))
            await in_a_moment(lambda: store.inspect("k").waiting == 0)
        await in_a_moment(lambda: is_as_new(store))

    async def wait_for(lock):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(lock.acquire(), 0.1)
        assert lock.lease is None

    async def timeout(lock):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1), lock:
                pytest.fail("two have the key")

    async def move_on(lock):
        with anyio.move_on_after(0.1) as scope:
            async with lock:
                pytest.fail("two have the key")
        assert scope.cancelled_caught

    asyncio.run(main())


def test_a_block_that_is_timed_out_by_anyio_releases(new_lock, store):
    """Its scopes cancel again and again until they are left."""

    async def main():
        with anyio.move_on_after(0.1) as scope:
            async with new_lock():
                await asyncio.sleep(60)
        assert scope.cancelled_caught
        await in_a_moment(lambda: is_as_new(store))

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(40))
def test_a_storm_of_cancellations_leaves_nothing_and_lets_no_two_in(new_lock, store, seed):
    chance = random.Random(seed)
    inside = 0
    entries = count()

    async def live():
        nonlocal inside
        lock = new_lock()
        for _ in range(chance.randrange(1, 4)):
            async with lock:
                inside += 1
                try:
                    assert inside == 1
                    next(entries)
                    await asyncio.sleep(chance.choice([0, 0, 0.001, 0.003]))
                finally:
                    inside -= 1

    async def cancel(task):
        await asyncio.sleep(chance.choice([0, chance.random() * 0.05]))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()

    async def main():
        tasks = [asyncio.create_task(live()) for _ in range(30)]
        cancelled = chance.sample(tasks, 24)
        await asyncio.gather(*(cancel(task) for task in cancelled))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or type(each) is asyncio.CancelledError for each in done)
        assert sum(each is None for each in done) >= 6
        await in_a_moment(lambda: is_as_new(store))

    asyncio.run(main())
    with Lock("k", store=store, timeout=30):
        pass
    assert next(entries) >= 6


def test_a_loop_that_ends_with_its_waiters_leaves_nothing(new_lock, store):
    """As `asyncio.run` does when its main coroutine returns."""

    async def main():
        held = asyncio.Event()
        tasks = [asyncio.create_task(hold(new_lock(), held)) for _ in range(10)]
        await held.wait()
        await in_a_moment(lambda: store.inspect("k").waiting == 9)
        assert tasks

    asyncio.run(main())
    wait_until(lambda: is_as_new(store))
