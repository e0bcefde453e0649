from __future__ import annotations

import asyncio
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from celery_distlock.async_lock import AsyncLock
from celery_distlock.stores.memory import MemoryStore
from celery_distlock.stores.redis.store import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from celery_distlock.stores import Store


@pytest.fixture
def redis_store(redis_url: str, prefix: str) -> Iterator[RedisStore]:
    with closing(RedisStore(redis_url, prefix)) as store:
        yield store


@pytest.fixture(params=["redis", "memory"])
def store(request: pytest.FixtureRequest, prefix: str) -> Iterator[Store]:
    if request.param == "redis":
        yield request.getfixturevalue("redis_store")
    else:
        with closing(MemoryStore("memory://", prefix)) as store:
            yield store


@pytest.fixture
def new_lock(store: Store) -> Callable[..., AsyncLock]:
    return lambda key="k", **options: AsyncLock(key, store=store, **options)


@pytest.fixture
def new_redis_lock(redis_store: RedisStore) -> Callable[..., AsyncLock]:
    return lambda key="k", **options: AsyncLock(key, store=redis_store, **options)


def is_as_new(store: Store, key: str = "k") -> bool:
    """Whether *key* has neither holder nor waiter."""
    state = store.inspect(key)
    return not state.token and not state.waiting


async def in_a_moment(fact: Callable[[], Any], timeout: float = 30.0) -> None:
    """Wait in the event loop until *fact* is true."""
    async with asyncio.timeout(timeout):
        while not fact():
            await asyncio.sleep(0.005)
