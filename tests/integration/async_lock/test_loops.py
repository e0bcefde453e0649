"""Several event loops, one after the other or side by side, closed ones, and forked children."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from celery_distlock import Lock
from tests.integration.async_lock.conftest import in_a_moment, is_as_new
from tests.waiting import wait_until


def test_one_lock_serves_one_loop_after_the_other(new_lock, store):
    lock = new_lock()

    async def main():
        async with lock as lease:
            return lease.token

    tokens = [asyncio.run(main()) for _ in range(3)]
    assert tokens == sorted(set(tokens))
    assert is_as_new(store)


def test_loops_in_several_threads_exclude_each_other(new_lock):
    lock = new_lock()
    counted = 0

    async def count():
        nonlocal counted
        for _ in range(5):
            async with lock:
                seen = counted
                await asyncio.sleep(0.0005)
                counted = seen + 1

    async def main():
        await asyncio.gather(*(count() for _ in range(5)))

    threads = [threading.Thread(target=asyncio.run, args=[main()]) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert counted == 100


@pytest.fixture
def new_loop():
    """Loops that the test closes, with what is left in them."""
    loops = []

    def make():
        loops.append(asyncio.new_event_loop())
        loops[-1].set_exception_handler(lambda *_: None)  # tasks are destroyed while pending
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()
    loops.clear()
    gc.collect()  # what is thrown away is so in no other loop


async def hold(lock):
    async with lock:
        await asyncio.sleep(60)


def test_the_key_of_a_loop_that_is_closed_is_free_after_the_lease(new_lock, store, new_loop):
    loop = new_loop()
    task = loop.create_task(hold(new_lock(lease=0.6)))  # kept until the end of the test
    loop.run_until_complete(in_a_moment(lambda: store.inspect("k").token))
    loop.close()
    with Lock("k", store=store, timeout=10):
        assert not task.done()


def test_the_key_of_a_loop_that_is_thrown_away_is_free_after_the_lease(new_lock, store, new_loop):
    loop = new_loop()
    task = loop.create_task(hold(new_lock(lease=0.6)))
    loop.run_until_complete(in_a_moment(lambda: store.inspect("k").token))
    loop.close()
    del task
    with Lock("k", store=store, timeout=10):
        pass


@contextmanager
def held_elsewhere(store):
    """Have a thread of its own hold the key."""
    held, done = threading.Event(), threading.Event()

    def hold():
        with Lock("k", store=store):
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join(60)


def test_a_waiter_in_a_loop_that_is_closed_keeps_no_other_waiting(new_lock, store, new_loop):
    with held_elsewhere(store):
        loop = new_loop()
        tasks = [loop.create_task(hold(new_lock())) for _ in range(5)]
        loop.run_until_complete(in_a_moment(lambda: store.inspect("k").waiting == 5))
        loop.close()
    began = time.monotonic()
    with Lock("k", store=store, timeout=30):
        assert time.monotonic() - began < 10
    assert not any(each.done() for each in tasks)
    wait_until(lambda: is_as_new(store))


def test_a_waiter_in_a_loop_that_is_thrown_away_leaves_the_queue(new_lock, store, new_loop):
    with held_elsewhere(store):
        loop = new_loop()
        tasks = [loop.create_task(hold(new_lock())) for _ in range(5)]
        loop.run_until_complete(in_a_moment(lambda: store.inspect("k").waiting == 5))
        loop.close()
        del tasks

        def is_empty():
            gc.collect()  # again: a thread may just have been at one of them
            return store.inspect("k").waiting == 0

        wait_until(is_empty)


def test_a_loop_that_is_closed_during_a_request_leaves_nothing(new_lock, store, new_loop):
    for turns in range(1, 7):
        loop = new_loop()
        task = loop.create_task(hold(new_lock(lease=0.5)))
        for _ in range(turns):
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        wait_until(lambda: is_as_new(store))
        assert not task.done()


FORK = """
import asyncio, os, sys, threading, warnings
from celery_distlock import AsyncLock, Lock
from celery_distlock.engine.acquisition import held_here
from celery_distlock.stores import open_store

warnings.simplefilter("ignore", DeprecationWarning)  # a process with threads forks
store = open_store(sys.argv[1], sys.argv[2])

async def enter(timeout):
    return await AsyncLock("k", store=store).acquire(timeout)

async def main():
    async with AsyncLock("k", store=store, lease=3.0) as lease:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                thread = threading.Thread(target=in_child)
                thread.start()
                thread.join(30)
                status = 0 if seen == [{}, False, True] else 2
            finally:
                os._exit(status)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert lease.held and store.inspect("k").token == lease.token
        print(os.waitstatus_to_exitcode(status))

seen = []

def in_child():
    seen.append(held_here())
    seen.append(asyncio.run(enter(0.1)))
    seen.append(asyncio.run(other()))

async def other():
    async with AsyncLock("other", store=store):
        return await asyncio.create_task(enter(0)) is False

asyncio.run(main())
"""


def test_a_forked_child_has_nothing_of_its_parents(redis_url, prefix):
    done = run(FORK, redis_url, prefix)
    assert done.stdout.split() == ["0"]


def run(program, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


GREENLETS = """
import {library}
{patch}
from celery_distlock import AsyncLock
from celery_distlock.errors import ConfigurationError
try:
    AsyncLock("k", store="memory://")
except ConfigurationError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("library", "patch"),
    [
        ("gevent.monkey", "gevent.monkey.patch_all()"),
        ("eventlet", "eventlet.monkey_patch()"),
    ],
)
def test_a_process_of_greenlets_is_refused_by_name(library, patch):
    done = run(f"import warnings; warnings.simplefilter('ignore')\n{GREENLETS.format(**locals())}")
    assert f"{library.partition('.')[0]} has patched this process; use Lock()" in done.stdout


def test_uvloop_runs_it_as_well(new_lock, store):
    uvloop = pytest.importorskip("uvloop")
    counted = 0

    async def count():
        nonlocal counted
        for _ in range(5):
            async with new_lock():
                seen = counted
                await asyncio.sleep(0.0005)
                counted = seen + 1

    async def main():
        tasks = [asyncio.create_task(count()) for _ in range(20)]
        await asyncio.gather(*tasks)
        async with new_lock():
            waiter = asyncio.create_task(count())
            await in_a_moment(lambda: store.inspect("k").waiting == 1)
            waiter.cancel()
            await in_a_moment(lambda: store.inspect("k").waiting == 0)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert counted == 100
    assert is_as_new(store)


def test_uvloop_that_is_closed_lets_go(new_lock, store):
    uvloop = pytest.importorskip("uvloop")
    loop = uvloop.new_event_loop()
    loop.set_exception_handler(lambda *_: None)
    tasks = [loop.create_task(hold(new_lock(lease=0.6))) for _ in range(2)]
    loop.run_until_complete(in_a_moment(lambda: store.inspect("k").waiting == 1))
    loop.close()
    with Lock("k", store=store, timeout=10):
        assert not any(each.done() for each in tasks)
