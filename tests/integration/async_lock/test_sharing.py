"""Several `AsyncLock`s of one key at once, and exclusive after having shared."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import pytest

from celery_distlock import AsyncLock, Key, Lock
from celery_distlock.errors import LockConflictError, LockError
from celery_distlock.stores.memory import MemoryStore
from tests.integration.async_lock.conftest import in_a_moment, is_as_new


async def has(lock, entered: asyncio.Event, leave: asyncio.Event) -> None:
    """Have *lock* until *leave* is set."""
    async with lock:
        entered.set()
        await leave.wait()


@contextlib.asynccontextmanager
async def another(lock):
    """Another task has *lock* in this block; yields what has it leave."""
    entered, leave = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(has(lock, entered, leave))
    await asyncio.wait_for(entered.wait(), 30)
    try:
        yield leave
    finally:
        leave.set()
        await task


async def acquire_once(lock) -> bool:
    got = await lock.acquire(timeout=0)
    if got:
        await lock.release()
    return got


def elsewhere(lock) -> asyncio.Task[bool]:
    """Whether another task gets *lock* at once."""
    return asyncio.create_task(acquire_once(lock))


def test_as_many_tasks_have_it_as_there_are_units(new_lock, store):
    inside, most, slots = [], [], []

    async def use():
        async with new_lock(Key("k", capacity=3)) as lease:
            inside.append(lease.slot)
            most.append(len(inside))
            slots.append(lease.slot)
            assert len(set(inside)) == len(inside)
            await asyncio.sleep(0.01)
            inside.remove(lease.slot)

    async def main():
        await asyncio.gather(*[use() for _ in range(30)])

    asyncio.run(main())
    assert max(most) == 3
    assert set(slots) == {0, 1, 2}
    assert is_as_new(store)


def test_one_that_is_alone_inside_one_that_shares_upgrades_it_for_its_block(new_lock, store):
    async def main():
        async with new_lock(shared=True) as lease:
            tokens = [lease.token]
            async with new_lock() as inner:
                tokens.append(inner.token)
                assert not await elsewhere(new_lock(shared=True))
            tokens.append(lease.token)
            assert lease.shared
            assert await elsewhere(new_lock(shared=True))
            assert tokens == sorted(set(tokens))

    asyncio.run(main())
    assert is_as_new(store)


def test_an_upgrade_waits_in_the_event_loop_for_the_others(new_lock, store):
    async def main():
        async with another(new_lock(shared=True)) as leave, new_lock(shared=True):
            asyncio.get_running_loop().call_later(0.2, leave.set)
            begin = time.monotonic()
            async with new_lock(timeout=30) as alone:
                assert not alone.shared
                assert 0.15 < time.monotonic() - begin < 10

    asyncio.run(main())
    assert is_as_new(store)


def test_an_upgrade_that_takes_too_long_leaves_the_share(new_lock, store):
    async def main():
        async with another(new_lock(shared=True)), new_lock(shared=True) as lease:
            with pytest.raises(LockConflictError):
                await new_lock(timeout=0.1).__aenter__()
            assert not await new_lock().acquire(timeout=0)
            assert lease.held
            assert lease.shared
            assert await elsewhere(new_lock(shared=True))

    asyncio.run(main())
    assert is_as_new(store)


def test_of_two_upgrades_the_second_is_refused_at_once(new_lock, store):
    async def upgrade(lock):
        async with new_lock(shared=True):
            shared.set()
            async with lock:
                assert not lock.lease.shared

    shared = asyncio.Event()

    async def main():
        async with new_lock(shared=True):
            first = asyncio.create_task(upgrade(new_lock()))
            await shared.wait()
            while await elsewhere(new_lock(shared=True)):
                await asyncio.sleep(0.01)
            with pytest.raises(LockConflictError):
                await new_lock().acquire()
        await asyncio.wait_for(first, 30)

    asyncio.run(main())
    assert is_as_new(store)


def test_a_task_that_is_cancelled_while_it_upgrades_leaves_the_door_open(new_lock, store):
    async def upgrade():
        async with new_lock(shared=True) as lease:
            shared.set()
            try:
                await new_lock().acquire()
            except asyncio.CancelledError:
                assert lease.held
                assert lease.shared
                cancelled.set()
            await leave.wait()

    shared, cancelled, leave = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def main():
        async with another(new_lock(shared=True)):
            task = asyncio.create_task(upgrade())
            await shared.wait()
            while await elsewhere(new_lock(shared=True)):
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(cancelled.wait(), 30)
            while not await elsewhere(new_lock(shared=True)):
                await asyncio.sleep(0.01)
            leave.set()
            await asyncio.wait_for(task, 30)

    asyncio.run(main())
    assert is_as_new(store)


def test_the_tasks_of_a_loop_upgrade_what_is_around_it_one_after_the_other(new_lock, store):
    """As in a locked task that shares its key and runs a loop."""

    async def write():
        async with new_lock() as lease:
            assert not lease.shared
            inside.append(None)
            assert len(inside) == 1
            await asyncio.sleep(0.01)
            inside.clear()

    async def main():
        await asyncio.gather(*[write() for _ in range(5)])

    inside: list[None] = []
    with Lock("k", store=store, shared=True) as around:
        asyncio.run(main())
        assert around.shared
        assert around.held
    assert is_as_new(store)


def test_a_blocking_upgrade_is_refused_in_a_coroutine(new_lock, store):
    async def main():
        async with new_lock(shared=True) as lease:
            with pytest.raises(LockError, match="use AsyncLock"):
                lease.upgrade()
            assert lease.held

    asyncio.run(main())
    assert is_as_new(store)


def test_a_key_cools_down_after_a_block_without_an_error(new_lock, store):
    async def main():
        with contextlib.suppress(KeyError):
            async with new_lock(Key("k", cooldown=60)):
                raise KeyError
        assert is_as_new(store)
        async with new_lock(Key("k", cooldown=60)):
            pass
        await in_a_moment(lambda: store.inspect("k").owner.startswith("parked:resting:"))

    asyncio.run(main())


class Slow(MemoryStore):
    """Holds back the next call of one kind, after it was done or before, until it may go on."""

    def __init__(self):
        super().__init__("memory://", "test")
        self._upgrade, self._downgrade = self.units.upgrade, self.units.downgrade
        self.units.upgrade, self.units.downgrade = self.upgrade, self.downgrade
        self.slow = ""  # the name of what is held back
        self.came, self.may_go = threading.Event(), threading.Event()

    def _hold_back(self, name):
        if self.slow == name:
            self.slow = ""
            self.came.set()
            assert self.may_go.wait(30)

    def inbox(self, key, owner):
        self._hold_back("inbox")
        return super().inbox(key, owner)

    def upgrade(self, key, owner, lease, inbox=None):
        reply = self._upgrade(key, owner, lease, inbox)
        self._hold_back("upgrade")
        return reply

    def downgrade(self, key, owner, lease):
        self._hold_back("downgrade")
        return self._downgrade(key, owner, lease)


@contextlib.asynccontextmanager
async def cut_short(store, what):
    """The block is cancelled, from outside, when the store is at *what*."""
    store.slow = what
    try:
        async with asyncio.timeout(30) as time_limit:

            async def cut():
                await in_a_moment(store.came.is_set)
                time_limit.reschedule(0)

            cutter = asyncio.create_task(cut())
            yield
    except TimeoutError:
        await cutter
    else:
        raise AssertionError("it was not cut short")


@pytest.mark.parametrize("what", ["downgrade", "upgrade", "inbox"])
def test_one_that_enters_alone_after_one_that_was_cut_short_stays_alone(what):
    """The store is slow to share the key again, or to upgrade it; what was begun goes on late."""

    async def main():
        async with AsyncLock("k", store=store, shared=True) as around:
            async with cut_short(store, what), AsyncLock("k", store=store):
                pass
            asyncio.get_running_loop().call_later(0.2, store.may_go.set)
            async with AsyncLock("k", store=store) as lease:
                await in_a_moment(store.may_go.is_set)
                for _ in range(20):  # until everything late has been done
                    await asyncio.sleep(0.01)
                    assert not lease.shared
                    assert not await elsewhere(AsyncLock("k", store=store, shared=True))
            assert around.shared
            assert await elsewhere(AsyncLock("k", store=store, shared=True))

    with contextlib.closing(Slow()) as store:
        asyncio.run(main())
        assert is_as_new(store)


def test_an_upgrade_that_is_cut_short_as_it_is_granted_leaves_the_door_open():
    async def main():
        async with AsyncLock("k", store=store, shared=True) as around:
            async with cut_short(store, "upgrade"):
                await AsyncLock("k", store=store).acquire(timeout=0)
            store.may_go.set()
            async with asyncio.timeout(30):
                while not await elsewhere(AsyncLock("k", store=store, shared=True)):
                    await asyncio.sleep(0.01)
            assert around.shared

    with contextlib.closing(Slow()) as store:
        asyncio.run(main())
        assert is_as_new(store)
