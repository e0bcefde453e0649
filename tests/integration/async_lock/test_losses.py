"""A task learns of the loss of its lock before anybody else can have the key."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from celery_distlock import AsyncLock, Lock
from celery_distlock.errors import LockLostError
from celery_distlock.stores import ReleaseRequest
from tests.integration.async_lock.conftest import in_a_moment

FOREVER = 60


def lose(store, key="k"):
    """Have the store forget who has *key*, as after a flush."""
    store.release(ReleaseRequest(key, store.inspect(key).owner))


def test_a_lost_lock_cancels_its_task_and_the_block_says_so(new_lock, store):
    async def main():
        task = asyncio.current_task()
        with pytest.raises(LockLostError) as caught:
            async with new_lock(lease=0.6) as lease:
                lose(store)
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError as error:
                    assert error.args == ("lock 'k' was lost",)
                    assert not lease.held
                    raise
        assert caught.value.token == lease.token
        assert "no longer knows it" in caught.value.reason
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert not task.cancelling()
        await asyncio.sleep(0)  # and goes on

    asyncio.run(main())


def test_release_says_so_too(new_lock, store):
    async def main():
        lock = new_lock(lease=0.6)
        await lock.acquire()
        lose(store)
        with pytest.raises(LockLostError):
            try:
                await asyncio.sleep(FOREVER)
            finally:
                await lock.release()
        assert not asyncio.current_task().cancelling()
        await asyncio.sleep(0)
        assert lock.lease is None

    asyncio.run(main())


def test_with_warn_the_task_goes_on_and_its_end_says_so(new_lock, store, caplog):
    async def main():
        with pytest.raises(LockLostError):
            async with new_lock(lease=0.3, on_lost="warn") as lease:
                lose(store)
                await in_a_moment(lambda: not lease.held)
                await asyncio.sleep(0.05)
        assert not asyncio.current_task().cancelling()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert [r.message for r in caplog.records if "was lost" in r.message]


def test_what_the_block_raises_itself_is_not_hidden(new_lock, store):
    async def main():
        with pytest.raises(ZeroDivisionError):
            async with new_lock(lease=0.3):
                lose(store)
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError:
                    raise ZeroDivisionError from None
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_a_block_that_takes_no_notice_of_the_cancellation_is_told_at_its_end(new_lock, store):
    async def main():
        with pytest.raises(LockLostError):
            async with new_lock(lease=0.3):
                lose(store)
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError:
                    pass
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.parametrize("style", ["block", "release"])
def test_a_cancellation_by_somebody_else_goes_on(new_lock, store, style):
    lost = asyncio.Event()

    async def hold():
        lock = new_lock(lease=0.3)
        if style == "block":
            async with lock as lease:
                await waiting(lease)
        else:
            await lock.acquire()
            try:
                await waiting(lock.lease)
            finally:
                await lock.release()

    async def waiting(lease):
        try:
            lose(store)
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            lost.set()
            await asyncio.sleep(FOREVER)  # until the other cancellation

    async def main():
        task = asyncio.create_task(hold())
        await lost.wait()
        task.cancel("by another")
        with pytest.raises(asyncio.CancelledError, match="by another"):
            await task
        assert task.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("inside", [True, False])
def test_a_timeout_at_the_time_of_the_loss_is_told_from_it(new_lock, store, inside):
    """Whoever is outside has the last word, as with two of `asyncio.timeout`."""

    async def both():
        task = asyncio.current_task()
        lose(store)
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            while task.cancelling() < 2:
                try:
                    await asyncio.sleep(FOREVER)
                except asyncio.CancelledError:
                    pass
            raise

    async def main():
        if inside:
            with pytest.raises(LockLostError):
                async with new_lock(lease=0.3), asyncio.timeout(1):
                    await both()
        else:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1), new_lock(lease=0.3):
                    await both()
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_of_two_locks_that_are_lost_the_outer_one_is_told(private_server):
    server = private_server()

    async def main():
        lock = AsyncLock("outer", store=server.url, lease=0.6)
        with pytest.raises(LockLostError) as caught:
            async with lock, AsyncLock("inner", store=server.url, lease=0.6):
                server.kill()
                await asyncio.sleep(FOREVER)
        assert caught.value.key in {"outer", "inner"}
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_children_of_a_task_group_end_with_the_task_that_loses_its_lock(new_lock, store):
    ended = []

    async def child():
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.append(True)

    async def main():
        with pytest.raises(LockLostError):
            async with new_lock(lease=0.3), asyncio.TaskGroup() as group:
                group.create_task(child())
                group.create_task(child())
                await asyncio.sleep(0)
                lose(store)
        assert len(ended) == 2

    asyncio.run(main())


def test_after_the_block_nobody_is_cancelled_for_its_loss(new_lock, store):
    async def main():
        for _ in range(20):
            try:
                async with new_lock(lease=0.1, watchdog=False):
                    until = time.monotonic() + 0.097
                    while time.monotonic() < until:
                        await asyncio.sleep(0)
            except LockLostError:
                pass
            for _ in range(5):
                await asyncio.sleep(0.001)  # would raise here
            assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_a_server_that_is_gone_is_told_before_anybody_else_could_have_the_key(
    private_server, fault
):
    server = private_server()
    term = 1.5  # seconds
    believed = told = 0.0

    async def main():
        nonlocal told
        with pytest.raises(LockLostError, match="no renewal was confirmed"):
            async with AsyncLock("k", store=server.url, lease=term) as lease:
                began = time.monotonic()
                {"paused": server.pause, "killed": server.kill}[fault]()
                watcher = asyncio.create_task(watch(lease, began))
                try:
                    await asyncio.sleep(FOREVER)
                finally:
                    told = time.monotonic() - began
                    await watcher
                    if fault == "paused":
                        server.resume()

    async def watch(lease, began):
        nonlocal believed
        while lease.held:
            believed = time.monotonic() - began
            await asyncio.sleep(0.001)

    asyncio.run(main())
    assert believed < term  # the store counts from later on
    assert told < term + 0.5
    if fault == "paused":
        with Lock("k", store=server.url, timeout=30):
            pass
