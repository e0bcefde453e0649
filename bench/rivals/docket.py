"""
docket: a worker of its own, whose tasks are coroutines; what is too early is scheduled again.

    python -m rivals.docket URL LIMIT SLOTS        a worker
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

from docket import Docket, RateLimit, Worker
from redis.asyncio import Redis

NAME = "docket"
STARTS = "bench:starts"


def task(url: str, limit: int) -> Callable[[], Awaitable[None]]:
    client, most = Redis.from_url(url), RateLimit(limit, per=timedelta(seconds=1))

    async def begin(_rate: RateLimit = most) -> None:
        await client.rpush(STARTS, time.time())

    return begin


async def send(url: str, limit: int, count: int) -> None:
    async with Docket(name=NAME, url=url) as docket:
        begin = task(url, limit)
        docket.register(begin)
        for _ in range(count):
            await docket.add(begin)()


async def work(url: str, limit: int, slots: int) -> None:
    async with Docket(name=NAME, url=url) as docket:
        docket.register(task(url, limit))
        async with Worker(docket, concurrency=slots) as worker:
            await worker.run_forever()


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
