"""Coroutines and tasks exclude each other, and a task's body may run an event loop."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from celery_distlock import AsyncLock, LockedTask
from celery_distlock.runtime.app import Runtime
from tests.apps import make_app
from tests.integration.async_lock.conftest import in_a_moment

SHARED = True


@pytest.fixture(params=["redis", "memory"])
def app(request, celery_env, prefix):
    app = make_app("async_locks")
    app.task = partial(app.task, shared=False)
    app.conf.distlock_wait = 0.2
    if request.param == "memory":
        app.conf.distlock_url = f"memory://{prefix}"
    yield app
    Runtime.of(app).store.close()
    app.close()


def test_a_coroutine_waits_for_a_task_that_runs(site, key):
    gate = f"{key}:gate"

    async def main():
        lock = AsyncLock(key, store=site.store)
        assert await lock.acquire(timeout=0.1) is False
        waiter = asyncio.create_task(enter())
        await in_a_moment(lambda: site.look(key).waiting == 1)
        site.journal.open(gate)
        assert await waiter

    async def enter():
        async with AsyncLock(key, store=site.store, timeout=30) as lease:
            return lease.held

    result = site.tasks.work_requeue.delay(key, "task", gate)
    site.wait_held(key)
    asyncio.run(main())
    result.get(timeout=30)


def test_a_task_is_parked_while_a_coroutine_has_its_key_and_woken_after_it(site, key):
    async def main():
        async with AsyncLock(key, store=site.store):
            result = site.tasks.count.delay(key)
            await in_a_moment(lambda: site.look(key).waiting == 1)
            assert not result.ready()
        await in_a_moment(result.ready)

    asyncio.run(main())
    assert site.journal.get(key) == 1


def test_tasks_and_coroutines_count_under_one_key_and_miss_nothing(site, key):
    journal = site.journal

    async def count():
        for _ in range(10):
            async with AsyncLock(key, store=site.store):
                seen = journal.get(key)
                await asyncio.sleep(0.002)
                journal.set(key, seen + 1)

    async def main():
        results = [site.tasks.count.delay(key) for _ in range(40)]
        await asyncio.gather(*(count() for _ in range(4)))
        await in_a_moment(lambda: all(each.ready() for each in results))

    asyncio.run(main())
    assert journal.read(f"{key}:overlaps") == []
    assert journal.get(key) == 80


def test_the_coroutines_of_a_tasks_body_enter_its_key_one_at_a_time(app):
    entered = []

    async def enter(key, token):
        async with AsyncLock(key) as lease:
            entered.append(lease.token == token)
            await asyncio.sleep(0)

    @app.task(base=LockedTask, lock_key="{key}", bind=True)
    def run(self, key):
        async def main():
            await asyncio.gather(*(enter(key, self.lock.token) for _ in range(5)))

        asyncio.run(main())
        return self.lock.held

    app.set_current()
    assert run("k") is True
    assert entered == [True] * 5


def test_a_locked_task_that_a_coroutine_calls_enters_what_its_task_holds(app):
    @app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="fail", bind=True)
    def token(self, key):
        return self.lock.token

    async def main():
        async with AsyncLock("k") as lease:
            assert token("k") == lease.token
            with pytest.raises(Exception, match="is held"):
                await asyncio.create_task(call())

    async def call():
        return token("k")

    app.set_current()
    asyncio.run(main())


def test_without_a_store_it_is_that_of_the_current_app(app):
    async def main():
        async with AsyncLock("k") as lease:
            assert Runtime.of(app).store.inspect("k").token == lease.token

    app.set_current()
    asyncio.run(main())
