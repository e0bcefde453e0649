"""Waiting costs no thread, few commands, and bears with a store that is unreachable for a while."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from celery_distlock import AsyncLock, Key, Lock, Rate
from celery_distlock.engine import async_acquisition, waiting
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import open_store
from tests.integration.async_lock.conftest import in_a_moment

MANY = 1000
RATED = 30
MOST_THREADS = 12  # eight for requests; for pushes, renewals, releases and counts, one each


def test_a_thousand_waiters_need_no_thread_each_and_three_commands(private_server):
    server = private_server()
    store = open_store(server.url, "p")
    order: list[int] = []

    async def enter(number):
        async with AsyncLock("k", store=store):
            order.append(number)

    async def main():
        before = threading.active_count()
        async with AsyncLock("k", store=store):
            tasks = [asyncio.create_task(enter(number)) for number in range(MANY)]
            await in_a_moment(lambda: store.inspect("k").waiting == MANY)
            assert threading.active_count() <= before + MOST_THREADS
            client.config_resetstat()
            began = time.monotonic()
        await asyncio.gather(*tasks)
        return time.monotonic() - began

    with server.client() as client:
        took = asyncio.run(main())
        calls = {name: each["calls"] for name, each in client.info("commandstats").items()}
    assert order == list(range(MANY))
    assert took < 60
    # Two more of each to come: a claim and a release, besides its first request.
    requests = calls["cmdstat_evalsha"] + calls.get("cmdstat_eval", 0)
    assert requests <= 2.05 * MANY
    assert calls["cmdstat_publish"] <= MANY


@pytest.mark.parametrize("wants", [{"capacity": 1}, {"shared": True}], ids=str)
def test_a_waiter_for_a_rate_enters_when_it_is_due_though_no_worker_looks(private_server, wants):
    server = private_server()
    store = open_store(server.url, "p")
    key = Key("k", rate=Rate(20, per=2.0), **wants)

    async def enter():
        async with AsyncLock(key, store=store):
            pass

    async def main():
        began = time.monotonic()
        await asyncio.gather(*(enter() for _ in range(RATED)))
        return time.monotonic() - began

    with server.client() as client:
        took = asyncio.run(main())
        calls = client.info("commandstats")
    assert 0.1 * (RATED - 2) < took < 0.5 * RATED  # by its place, each would look a second later
    assert calls["cmdstat_evalsha"]["calls"] <= 9 * RATED
    assert calls["cmdstat_publish"]["calls"] <= 2 * RATED


def test_a_request_asks_once_to_be_in_the_queue(private_server):
    server = private_server()
    store = open_store(server.url, "p")

    async def wait():
        await AsyncLock("k", store=store).acquire(60)

    async def main():
        async with AsyncLock("k", store=store, lease=300):
            first = asyncio.create_task(wait())
            await in_a_moment(lambda: store.inspect("k").waiting == 1)
            client.config_resetstat()
            tasks = [asyncio.create_task(wait()) for _ in range(200)]
            await in_a_moment(lambda: waiting() == 201)
            calls = client.info("commandstats")
            for each in (first, *tasks):
                each.cancel()
            return calls["cmdstat_evalsha"]["calls"] - looks

    def waiting():
        nonlocal looks
        looks += 1
        return store.inspect("k").waiting

    looks = 0
    with server.client() as client:
        assert asyncio.run(main()) <= 202


def test_waiters_at_many_keys_are_all_served(redis_store):
    async def take(key, times):
        for _ in range(times):
            async with AsyncLock(key, store=redis_store):
                await asyncio.sleep(0)

    async def main():
        before = threading.active_count()
        tasks = [asyncio.create_task(take(f"k{n % 20}", 5)) for n in range(100)]
        await asyncio.gather(*tasks)
        assert threading.active_count() <= before + MOST_THREADS

    asyncio.run(main())


def test_coroutines_and_threads_that_wait_hand_the_reading_to_each_other(redis_store):
    """Blocked waiters leave one after the other, and each may have been the one that reads."""
    counted = 0

    def count_in_a_thread():
        nonlocal counted
        for _ in range(10):
            with Lock("k", store=redis_store, timeout=60):
                counted += 1

    async def count():
        nonlocal counted
        for _ in range(10):
            async with AsyncLock("k", store=redis_store, timeout=60):
                counted += 1
            await asyncio.sleep(0.01)

    async def main():
        await asyncio.gather(
            *(asyncio.to_thread(count_in_a_thread) for _ in range(4)), *(count() for _ in range(4))
        )

    began = time.monotonic()
    asyncio.run(main())
    assert counted == 80
    assert time.monotonic() - began < 20  # with lost pushes each would take a second


def test_the_thread_for_pushes_ends_without_waiters(redis_store):
    async def main():
        async with AsyncLock("k", store=redis_store):
            waiter = asyncio.create_task(wait())
            await in_a_moment(lambda: redis_store.inspect("k").waiting == 1)
            assert pushes()
        await waiter
        await in_a_moment(lambda: not pushes())

    async def wait():
        async with AsyncLock("k", store=redis_store):
            pass

    def pushes():
        return [each for each in threading.enumerate() if each.name == "distlock-pushes"]

    asyncio.run(main())


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["paused", "restarted"])
def test_waiters_tolerate_a_server_that_comes_back(private_server, fault):
    server = private_server()
    store = open_store(server.url, "p")
    entered = []

    async def enter(number):
        async with AsyncLock("k", store=store, timeout=60):
            entered.append(number)

    async def main():
        lock = AsyncLock("k", store=store, on_lost="warn", lease=20)
        await lock.acquire()
        tasks = [asyncio.create_task(enter(number)) for number in range(20)]
        await in_a_moment(lambda: store.inspect("k").waiting == 20)
        if fault == "paused":
            server.pause()
            await asyncio.sleep(1.5)
            server.resume()
            await lock.release()
        else:
            await asyncio.to_thread(server.restart)  # which forgets everything
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks)

    asyncio.run(main())
    assert sorted(entered) == list(range(20))


@pytest.mark.faults
def test_a_server_that_does_not_come_back_is_unavailable(private_server, monkeypatch):
    monkeypatch.setattr(waiting, "PATIENCE", 1.0)
    server = private_server()
    store = open_store(server.url, "p")

    async def main():
        lock = AsyncLock("k", store=store, on_lost="warn")
        await lock.acquire()
        tasks = [asyncio.create_task(enter()) for _ in range(3)]
        await in_a_moment(lambda: store.inspect("k").waiting == 3)
        server.kill()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in outcomes} == {StoreUnavailableError}

    async def enter():
        async with AsyncLock("k", store=store):
            pytest.fail("the server is gone")

    asyncio.run(main())


@pytest.mark.faults
def test_a_server_that_hangs_delays_no_one_longer_than_a_request(private_server, monkeypatch):
    """Nor does it keep those behind the threads that it hangs in."""
    monkeypatch.setattr(async_acquisition, "LIMIT", 2.0)
    server = private_server()
    store = open_store(server.url, "p")

    async def ask(number):
        lock = AsyncLock(f"k{number}", store=store)
        if number % 2:
            await lock.acquire(timeout=0)
        else:
            await lock.acquire()

    async def main():
        held = AsyncLock("held", store=store)
        await held.acquire()
        server.pause()
        began = time.monotonic()
        outcomes = await asyncio.gather(*map(ask, range(50)), return_exceptions=True)
        assert {type(each) for each in outcomes} == {StoreUnavailableError}
        await held.release()
        assert time.monotonic() - began < 8
        server.resume()
        await in_a_moment(lambda: not store.inspect("held").token)
        for number in range(50):
            await in_a_moment(lambda: not store.inspect(f"k{number}").token)  # noqa: B023

    asyncio.run(main())


def test_another_store_is_not_held_up_by_one_that_hangs(private_server, redis_store):
    server = private_server()
    hanging = open_store(server.url, "p")

    async def main():
        async with AsyncLock("k", store=hanging):
            pass
        server.pause()
        tasks = [asyncio.create_task(ask(number)) for number in range(20)]
        await asyncio.sleep(0.1)
        began = time.monotonic()
        async with AsyncLock("k", store=redis_store):
            assert time.monotonic() - began < 2
        server.resume()
        await asyncio.gather(*tasks)

    async def ask(number):
        async with AsyncLock(f"k{number}", store=hanging):
            pass

    asyncio.run(main())


def test_to_wait_behind_many_of_the_own_loop_is_no_outage(redis_store, monkeypatch):
    """Each request has its own time. One with less asks when it is over, and goes."""
    monkeypatch.setattr(async_acquisition, "LIMIT", 2.0)
    slow = type(redis_store).acquire

    def acquire(*arguments, **more):
        time.sleep(0.05)
        return slow(*arguments, **more)

    async def count(number):
        async with AsyncLock("k", store=redis_store, timeout=60):
            return number

    async def main():
        waiters = asyncio.gather(*map(count, range(60)))
        await asyncio.sleep(0)
        impatient = AsyncLock("k", store=redis_store)
        if await impatient.acquire(timeout=0.1):
            await impatient.release()
        assert not waiters.done()
        return await waiters

    monkeypatch.setattr(type(redis_store), "acquire", acquire)
    assert asyncio.run(main()) == list(range(60))
