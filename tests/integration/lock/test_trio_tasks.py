"""`Lock` in trio's tasks: they share a thread, and are not one owner for it."""

from __future__ import annotations

import importlib
import sys
import threading
from typing import Any

import pytest

from celery_distlock import Lock
from celery_distlock.errors import LockConflictError, LockError, LockNotOwnedError
from tests.workers import ROOT

PLACE = ROOT / ".venvs" / "trio"  # of its own: eventlet cannot be imported beside it


@pytest.fixture(scope="module")
def trio() -> Any:
    sys.path.append(str(PLACE))
    try:
        return importlib.import_module("trio")
    except ImportError:
        pytest.skip(f"trio is not in {PLACE}: make test puts it there")
    finally:
        sys.path.remove(str(PLACE))


@pytest.fixture
def new_lock(redis_store):
    return lambda **options: Lock("k", store=redis_store, **options)


@pytest.fixture
def run(trio):
    """Run tasks in one loop, each until it says that the next one is to go on, in turns."""
    return lambda *tasks: _run(trio, tasks)


def _run(trio, tasks) -> None:
    async def main() -> None:
        turns = [trio.Semaphore(0) for _ in tasks]

        def pause_of(number):
            async def pause() -> None:
                turns[(number + 1) % len(tasks)].release()
                await turns[number].acquire()

            return pause

        async def take_turns(number) -> None:
            await turns[number].acquire()
            await tasks[number](pause_of(number))
            turns[(number + 1) % len(tasks)].release()

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for number in range(len(tasks)):
                    nursery.start_soon(take_turns, number)
                turns[0].release()

    trio.run(main)


def test_two_tasks_do_not_enter_one_anothers_lock(run, new_lock):
    async def one(pause):
        with new_lock() as lease:
            await pause()
            with new_lock() as again:
                assert again.token == lease.token

    async def other(pause):
        assert not new_lock().acquire(blocking=False)
        with pytest.raises(LockConflictError), new_lock(timeout=0.05):
            pass
        with pytest.raises(LockError, match=r"another task of this trio loop.*trio\.to_thread"):
            new_lock().acquire()
        with pytest.raises(LockNotOwnedError):
            new_lock().release()
        assert new_lock().lease is None
        await pause()
        with new_lock(timeout=1):
            pass

    run(one, other)


def test_each_task_takes_units_of_its_own(run, new_lock):
    async def take(pause):
        assert new_lock(capacity=2).acquire(timeout=1)
        await pause()
        new_lock(capacity=2).release()

    async def find_none(pause):
        assert not new_lock(capacity=2).acquire(blocking=False)
        await pause()

    run(take, take, find_none)
    assert not new_lock(capacity=2).locked()


def test_without_an_end_to_the_wait_it_takes_units_that_are_free_and_waits_for_none(run, new_lock):
    async def take(pause):
        with new_lock(capacity=2):
            await pause()

    async def find_none(pause):
        with pytest.raises(LockError, match=r"another task of this trio loop"):
            new_lock(capacity=2).acquire()
        await pause()

    run(take, take, find_none)
    assert not new_lock(capacity=2).locked()


def test_who_shares_a_key_with_another_task_does_not_wait_for_it_to_have_it_alone(run, new_lock):
    async def share(pause):
        with new_lock(shared=True):
            await pause()

    async def upgrade(pause):
        with new_lock(shared=True):
            with pytest.raises(LockError, match=r"another task of this trio loop"):
                new_lock().acquire()
            await pause()

    run(share, upgrade)
    assert not new_lock().locked()


def test_what_its_thread_holds_around_the_loop_may_be_entered(run, new_lock):
    async def enter(_pause):
        with new_lock() as again:
            assert again.token == lease.token

    with new_lock() as lease:
        run(enter)
        assert new_lock().lease is not None
    assert not new_lock().locked()


def test_a_thread_that_a_task_waits_for_may_wait_for_it(trio, new_lock):
    waits = threading.Event()

    def take() -> None:
        waits.set()
        with new_lock(timeout=30):
            pass

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            with new_lock():
                nursery.start_soon(trio.to_thread.run_sync, take)
                while not waits.is_set():
                    await trio.sleep(0.01)

    trio.run(main)
    assert not new_lock().locked()
