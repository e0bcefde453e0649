"""A task is notified that its lock is lost, and believes in it no longer than it has it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from contextlib import suppress

import pytest

from celery_distlock import AsyncLock, Lock, signals
from celery_distlock.engine.hold import Hold, Terms
from celery_distlock.engine.task_holds import LossNotice
from celery_distlock.errors import LockLostError
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.memory import MemoryStore
from tests.integration.async_lock.conftest import in_a_moment

FOREVER = 60


def lose(store, key="k"):
    """Have the store forget the holder of *key*, as after a flush."""
    store.release(ReleaseRequest(key, store.inspect(key).owner))


def lost_by(hold):
    """Run *hold* in a loop; return the loss that it ends with, after which its task goes on."""

    async def main():
        with pytest.raises(LockLostError) as caught:
            await hold()
        assert not asyncio.current_task().cancelling()
        await asyncio.sleep(0)
        return caught.value

    return asyncio.run(main())


def test_a_lost_lock_cancels_its_task_and_the_block_says_so(new_lock, store):
    seen = []

    async def hold():
        async with new_lock(lease=0.6) as lease:
            lose(store)
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError as error:
                seen.extend([lease.token, lease.held, *error.args])
                raise

    loss = lost_by(hold)
    assert seen == [loss.token, False, "lock 'k' was lost"]
    assert "no longer knows it" in loss.reason
    assert isinstance(loss.__cause__, asyncio.CancelledError)


def test_release_says_so_too(new_lock, store):
    async def hold():
        lock = new_lock(lease=0.6)
        await lock.acquire()
        lose(store)
        try:
            await asyncio.sleep(FOREVER)
        finally:
            try:
                await lock.release()
            finally:
                assert lock.lease is None

    lost_by(hold)


def test_the_loss_of_a_grant_that_came_too_late_does_not_end_the_next(new_lock):
    """Receivers that are notified first, by a signal, take their time."""
    notified, entered = threading.Event(), threading.Event()

    def slow(**_facts):
        notified.set()
        assert entered.wait(30)

    async def hold():
        lock = new_lock(lease=2.0, watchdog=False)
        await lock.locked()
        asyncio.get_running_loop().call_soon(notified.wait, 30)  # it takes no grant until then
        async with lock as lease:
            entered.set()
            await asyncio.sleep(0.5)
            assert lease.held

    signals.lock_lost.connect(slow, weak=False)
    try:
        asyncio.run(hold())
    finally:
        signals.lock_lost.disconnect(slow)
    assert notified.is_set()


def test_a_loss_is_reported_once():
    async def main():
        task = asyncio.current_task()
        hold = Hold(MemoryStore("memory://", "test"), "k", Terms(), label="test")
        notice = LossNotice(task, cancels=True)
        notice(hold)
        notice(hold)  # one begins to listen and one finds the loss, at one moment
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(FOREVER)
        await asyncio.sleep(0.01)
        assert notice.end()
        assert not task.cancelling()

    asyncio.run(main())


def test_with_warn_the_task_goes_on_and_its_end_says_so(new_lock, store, caplog):
    async def hold():
        async with new_lock(lease=0.3, on_lost="warn") as lease:
            lose(store)
            await in_a_moment(lambda: not lease.held)
            await asyncio.sleep(0.05)

    with caplog.at_level(logging.WARNING):
        lost_by(hold)
    assert [each.message for each in caplog.records if "was lost" in each.message]


def test_what_the_block_raises_itself_is_not_hidden(new_lock, store):
    async def hold():
        async with new_lock(lease=0.3):
            lose(store)
            try:
                await asyncio.sleep(FOREVER)
            except asyncio.CancelledError:
                raise ZeroDivisionError from None

    async def main():
        with pytest.raises(ZeroDivisionError):
            await hold()
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


def test_a_block_that_ignores_the_cancellation_raises_at_its_end(new_lock, store):
    async def hold():
        async with new_lock(lease=0.3):
            lose(store)
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(FOREVER)

    lost_by(hold)


@pytest.mark.parametrize("style", ["block", "release"])
def test_a_cancellation_by_other_code_goes_on(new_lock, store, style):
    lost = asyncio.Event()

    async def hold():
        lock = new_lock(lease=0.3)
        if style == "block":
            async with lock:
                await wait()
        else:
            await lock.acquire()
            try:
                await wait()
            finally:
                await lock.release()

    async def wait():
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
def test_a_timeout_at_the_time_of_the_loss_is_distinguished_from_it(new_lock, store, inside):
    """The outer one has the last word, as with two of `asyncio.timeout`."""

    async def be_cancelled_by_both():
        lose(store)
        while asyncio.current_task().cancelling() < 2:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(FOREVER)
        raise asyncio.CancelledError

    async def hold():
        if inside:
            async with new_lock(lease=0.3), asyncio.timeout(1):
                await be_cancelled_by_both()
        else:
            async with asyncio.timeout(1), new_lock(lease=0.3):
                await be_cancelled_by_both()

    async def main():
        with pytest.raises(LockLostError if inside else TimeoutError):
            await hold()
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.faults
def test_of_two_lost_locks_one_is_reported_and_none_is_left(private_server):
    server = private_server()

    async def hold():
        outer = AsyncLock("outer", store=server.url, lease=0.6)
        async with outer, AsyncLock("inner", store=server.url, lease=0.6):
            server.kill()
            await asyncio.sleep(FOREVER)

    assert lost_by(hold).key in {"outer", "inner"}


def test_children_of_a_task_group_end_with_the_task_that_loses_its_lock(new_lock, store):
    ended = []

    async def child():
        try:
            await asyncio.sleep(FOREVER)
        finally:
            ended.append(True)

    async def hold():
        async with new_lock(lease=0.3), asyncio.TaskGroup() as group:
            group.create_task(child())
            group.create_task(child())
            await asyncio.sleep(0)
            lose(store)

    lost_by(hold)
    assert len(ended) == 2


def test_after_the_block_its_loss_cancels_nothing(new_lock, store):
    async def hold():
        async with new_lock(lease=0.1, watchdog=False):
            until = time.monotonic() + 0.097
            while time.monotonic() < until:
                await asyncio.sleep(0)

    async def main():
        for _ in range(20):
            with suppress(LockLostError):
                await hold()
            for _ in range(5):
                await asyncio.sleep(0.001)  # would raise here
            assert not asyncio.current_task().cancelling()

    asyncio.run(main())


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["paused", "killed"])
def test_no_holder_believes_in_a_lock_whose_server_is_gone_for_longer_than_its_lease(
    private_server, fault
):
    server = private_server()
    term = 1.5  # seconds
    believed = notified = 0.0

    async def hold():
        nonlocal notified
        async with AsyncLock("k", store=server.url, lease=term) as lease:
            began = time.monotonic()
            {"paused": server.pause, "killed": server.kill}[fault]()
            watcher = asyncio.create_task(watch(lease, began))
            try:
                await asyncio.sleep(FOREVER)
            finally:
                notified = time.monotonic() - began
                await watcher
                if fault == "paused":
                    server.resume()

    async def watch(lease, began):
        nonlocal believed
        while True:
            asked = time.monotonic()
            if not lease.held:
                return
            believed = asked - began
            await asyncio.sleep(0.001)

    assert lost_by(hold).reason == "no renewal was confirmed in time"
    assert believed < term  # the store counts from later on
    assert notified < term + 10.0  # as late as a busy machine makes it
    if fault == "paused":
        with Lock("k", store=server.url, timeout=30):
            pass
