"""A rate over two workers, compared with those of other libraries."""

import asyncio
import bisect
import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from figures import Figure, Part, Row
from workers import HERE, Worker

from celery_distlock.testing import EmbeddedServer, die_with_parent

LIMIT = 100  # starts a second
SECONDS = 30
COUNT = LIMIT * SECONDS
SLOTS = 4  # of each of two workers
LONGEST = 2.0 * SECONDS


def rates(server: EmbeddedServer, _rounds: int) -> Iterator[Part]:
    from app import absent_rates, rated, with_rates

    senders = {"celery-distlock": rated, **with_rates}
    rows = [_row(name, _by_celery(server, task)) for name, task in senders.items()]
    notes = [*absent_rates]
    try:
        from rivals import docket
    except ImportError as error:
        notes.append(f"docket is left out: {error}")
    else:
        rows.append(_row(docket.NAME, _by_docket(server, docket)))
    yield Part(
        "rates",
        f"{COUNT:,} tasks that do nothing, {LIMIT} a second over two workers of {SLOTS} slots",
        "of the rate is used",
        ["most in a second", "p99 late", "retries a task"],
        rows,
        notes,
    )


def _row(name: str, found: tuple[list[float], int | None]) -> Row:
    starts, retries = found
    ours = name == "celery-distlock"
    took = starts[-1] - starts[0]
    return Row(
        name,
        Figure((len(starts) - 1) / took / LIMIT, at_least=0.95 if ours else None),
        [
            Figure(_most(starts), places=0, at_most=LIMIT if ours else None),
            Figure(_late(starts) * 1e3, "ms", 0, at_most=20.0 if ours else None),
            Figure((retries or 0) / COUNT, places=1, at_most=0.0 if ours else None),
        ],
    )


def _most(starts: list[float]) -> int:
    """How many begin within one second, at most."""
    return max(
        bisect.bisect_left(starts, start + 1.0) - number for number, start in enumerate(starts)
    )


def _late(starts: list[float]) -> float:
    """How much longer than it has to be the time from one start to the next is, for 99 of 100."""
    pauses = sorted(b - a - 1 / LIMIT for a, b in itertools.pairwise(starts))
    return max(0.0, pauses[len(pauses) * 99 // 100])


def _by_celery(server: EmbeddedServer, task: Any) -> tuple[list[float], int]:
    def send() -> None:
        with task.app.producer_or_acquire() as producer:
            for _ in range(COUNT):
                task.apply_async(producer=producer)

    @contextmanager
    def working() -> Iterator[None]:
        with Worker(server, SLOTS), Worker(server, SLOTS):
            yield

    return _starts(server, send, working)


def _by_docket(server: EmbeddedServer, docket: Any) -> tuple[list[float], int]:
    @contextmanager
    def working() -> Iterator[None]:
        command = [sys.executable, "-m", "rivals.docket", server.url, str(LIMIT), str(SLOTS)]
        workers = [
            subprocess.Popen(die_with_parent(command), cwd=HERE, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        with ExitStack() as stack:
            for worker in workers:
                stack.callback(worker.wait)
                stack.callback(worker.kill)
            yield

    return _starts(server, lambda: asyncio.run(docket.send(server.url, LIMIT, COUNT)), working)


def _starts(
    server: EmbeddedServer, send: Callable[[], None], working: Callable[[], Any]
) -> tuple[list[float], int]:
    """Return when tasks began, in order, and how many retries there were."""
    from app import RETRIES, STARTS

    with server.client() as client:
        client.delete(STARTS, RETRIES)
        send()
        with working():
            until = time.monotonic() + LONGEST
            while client.llen(STARTS) < COUNT and time.monotonic() < until:
                time.sleep(0.2)
            found = sorted(map(float, client.lrange(STARTS, 0, -1)))
            retries = int(client.get(RETRIES) or 0)
        client.flushdb()  # what is left, of those that do not get to an end
    return found, retries
