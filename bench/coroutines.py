"""Coroutines of one event loop that all want one lock, once."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import NamedTuple

import redis.asyncio
from contention import QUESTIONS, sent
from figures import Figure, Part, Row, in_turn, median, ratio

from celery_distlock import AsyncLock
from celery_distlock.testing import EmbeddedServer

MANY = 1000
ROUNDS = 1  # one takes half a minute
CONNECTIONS = 100  # of redis.asyncio
OURS, THEIRS = "celery-distlock AsyncLock", "redis.asyncio Lock"

NewLock = Callable[[], AbstractAsyncContextManager[object]]
Locks = AbstractAsyncContextManager[NewLock]


class Crowd(NamedTuple):
    """What it took until all had it once."""

    seconds: float
    commands: float  # for each grant
    threads: int  # at most


def coroutines(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    # In this order: our threads are there for some seconds more.
    works = {THEIRS: partial(_crowd, server, _theirs), OURS: partial(_crowd, server, _ours)}
    crowds = in_turn(works, min(ROUNDS, rounds))
    ours = [crowd.seconds for crowd in crowds[OURS]]
    yield Part(
        "coroutines",
        f"One lock, wanted once by each of {MANY:,} coroutines",
        "time / ours",
        ["time", "commands a grant", "threads"],
        [_row(name, crowds[name], ours) for name in (OURS, THEIRS)],
    )


def _row(name: str, crowds: list[Crowd], ours: list[float]) -> Row:
    return Row(
        name,
        Figure(ratio([crowd.seconds for crowd in crowds], ours)),
        [
            Figure(median(crowd.seconds for crowd in crowds), "s"),
            Figure(
                median(crowd.commands for crowd in crowds), at_most=3.05 if name == OURS else None
            ),
            Figure(max(crowd.threads for crowd in crowds), places=0),
        ],
    )


def _crowd(server: EmbeddedServer, locks: Callable[[str], Locks]) -> Crowd:
    with server.client() as client:
        before = sent(client)
        seconds, threads = asyncio.run(_all_enter(locks(server.url)))
        return Crowd(seconds, (sent(client) - before - QUESTIONS) / MANY, threads)


async def _all_enter(locks: Locks) -> tuple[float, int]:
    threads = 0
    async with locks as new_lock:
        begin = time.perf_counter()
        tasks = [asyncio.create_task(_enter(new_lock())) for _ in range(MANY)]
        while not all(task.done() for task in tasks):
            threads = max(threads, threading.active_count())
            await asyncio.sleep(0.02)
        await asyncio.gather(*tasks)
        return time.perf_counter() - begin, threads


async def _enter(lock: AbstractAsyncContextManager[object]) -> None:
    async with lock:
        pass


@asynccontextmanager
async def _ours(url: str) -> AsyncIterator[NewLock]:
    yield lambda: AsyncLock("coroutines", store=url)


@asynccontextmanager
async def _theirs(url: str) -> AsyncIterator[NewLock]:
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url, max_connections=CONNECTIONS, timeout=None
    )
    async with redis.asyncio.Redis.from_pool(pool) as client:
        yield lambda: client.lock("redis.asyncio:coroutines", timeout=30)
