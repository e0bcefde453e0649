"""How many woken tasks a second a process sends to workers where the lock store is far away."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from figures import Figure, Part, Row, median

from celery_distlock.runtime.relay import Relay
from celery_distlock.stores import AcquireRequest, QueueStore, ReleaseRequest, open_store
from celery_distlock.stores.values import ParkRequest, PeerChannel, WokenTask
from celery_distlock.testing import EmbeddedServer

ONE_WAY = 0.1  # seconds
MANY = 40
PATIENCE = 60.0  # seconds
MESSAGE = {"exchange": "", "routing_key": "celery", "headers": {}}


def far(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    near, distant = open_store(server.url, "far"), open_store(_distant(server.url), "far")
    assert isinstance(near, QueueStore)
    assert isinstance(distant, QueueStore)
    received = threading.Semaphore(0)
    channel = near.channels.open_channel(lambda _: received.release())
    near.channels.register_channel(["celery"], PeerChannel(channel.address, MANY), 600.0)
    relay = Relay(Celery("far", set_as_current=False), lambda: distant)
    distant.publishers.add(lambda wake: relay.push(wake, MESSAGE))
    times = [_sent(near, distant, received, number) for number in range(rounds + 1)][1:]
    channel.close()
    seconds = median(times)
    yield Part(
        "far",
        f"{MANY} woken tasks of as many keys, sent by one process to another worker; the store is"
        f" {2 * ONE_WAY * 1e3:.0f} ms away",
        "tasks/s",
        ["all of them"],
        [
            Row(
                "sent at the same time",
                Figure(MANY / seconds, at_least=20.0),
                [Figure(seconds, "s")],
            )
        ],
    )


def _sent(near: QueueStore, distant: QueueStore, received: Any, number: int) -> float:
    wakes = [_woken(near, f"{number}-{each}") for each in range(MANY)]
    begin = time.perf_counter()
    for _ in distant.dispatch_each(wakes, lambda _: None, PATIENCE):
        received.acquire()
    return time.perf_counter() - begin


def _woken(store: QueueStore, key: str) -> WokenTask:
    park_request = ParkRequest(b"x" * 1300, task="shop.reserve")
    store.acquire(AcquireRequest(key, "a", 600.0))
    store.acquire(AcquireRequest(key, "b", 600.0, queue=park_request, run=f"{key}:0:0:0"))
    wake = store.release(ReleaseRequest(key, "a")).wake
    assert wake is not None
    return wake


def _distant(url: str) -> str:
    """Return the URL of a proxy to *url* that delays each direction by `ONE_WAY` seconds."""
    where, ports = urlsplit(url), []
    listening = threading.Event()

    async def serve() -> None:
        passing = await asyncio.start_server(connect, "127.0.0.1", 0)
        ports.append(passing.sockets[0].getsockname()[1])
        listening.set()
        await passing.serve_forever()

    async def connect(reader: Any, writer: Any) -> None:
        answers, requests = await asyncio.open_connection(where.hostname, where.port)
        await asyncio.gather(_pass_on(reader, requests), _pass_on(answers, writer))

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    listening.wait(PATIENCE)
    return where._replace(netloc=f"127.0.0.1:{ports[0]}").geturl()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    loop = asyncio.get_running_loop()
    while data := await reader.read(1 << 16):
        loop.call_later(ONE_WAY, writer.write, data)
    loop.call_later(ONE_WAY, writer.close)
