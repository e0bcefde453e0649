"""Stores that are far away: a proxy that delays what it passes on."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from figures import Figure, Part, Row, median

from celery_distlock import Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest, open_store
from celery_distlock.stores.values import ParkRequest
from celery_distlock.testing import EmbeddedServer

TRIPS = 0.001, 0.020, 0.200  # seconds for a round trip
TIMES = 20


def distance(server: EmbeddedServer, scale: float) -> Iterator[Part]:
    yield Part(
        "distance",
        "A store at a distance: one process, one request after the other",
        "round trips of a free lock",
        ["acquire + release", "parked, handed over and claimed", "round trips of it"],
        [_row(server, trip, max(3, int(TIMES * scale))) for trip in TRIPS],
    )


def _row(server: EmbeddedServer, trip: float, times: int) -> Row:
    with delayed(server.port, trip) as port:
        url = f"redis://127.0.0.1:{port}/0"
        free, handed = _free(url, times), _handed(url, times)
    figures = (
        Figure(free * 1000, "ms", 1),
        Figure(handed * 1000, "ms", 1),
        Figure(handed / trip, "", 1),
    )
    return Row(f"{trip * 1000:.0f} ms away", Figure(free / trip, "", 1), figures)


def _free(url: str, times: int) -> float:
    def turn() -> None:
        with Lock("distance", store=url):
            pass

    return _timed(turn, times)


def _handed(url: str, times: int) -> float:
    store, key = open_store(url, "distance"), "handed"
    store.acquire(AcquireRequest(key, "owner", 600.0))
    queue = ParkRequest(b"x" * 600)

    def turn() -> None:
        store.acquire(AcquireRequest(key, "", 600.0, queue, f"{uuid.uuid4().hex}:0:0:0"))
        wake = store.release(ReleaseRequest(key, "owner")).wake
        assert wake is not None
        store.acquire(AcquireRequest(key, "owner", 600.0, run=wake.run))

    taken = _timed(turn, times)
    store.release(ReleaseRequest(key, "owner"))
    store.close()
    return taken


def _timed(turn: Callable[[], object], times: int) -> float:
    """Return the median seconds of a turn; the first one connects, and loads the scripts."""
    taken = []
    for _ in range(times + 1):
        begin = time.perf_counter()
        turn()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])


@contextmanager
def delayed(port: int, trip: float) -> Iterator[int]:
    """Give the port of a proxy to *port* that holds back each way's bytes for half of *trip*."""
    loop, ready, ports = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        with suppress(asyncio.CancelledError):  # the proxy ends
            await asyncio.gather(
                _pass_on(reader, there[1], trip / 2), _pass_on(there[0], writer, trip / 2)
            )

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()
        for task in (tasks := asyncio.all_tasks(loop)):
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=run, name="proxy", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float
) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(65536):
        loop.call_later(delay, writer.write, data)
    loop.call_later(delay, writer.close)
