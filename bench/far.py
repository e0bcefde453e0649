"""How many woken tasks a second a process sends to workers where the lock store is far away."""

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from celery import Celery
from figures import Figure, Part, Row, median

from celery_distlock.runtime.relay import Relay
from celery_distlock.stores import AcquireRequest, QueueStore, ReleaseRequest, open_store
from celery_distlock.stores.values import ParkRequest, PeerChannel, Want, WokenTask
from celery_distlock.testing import EmbeddedServer

ONE_WAY = 0.1  # seconds
MANY = 40
EIGHT = 8  # woken at one key by one release
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
    distant.publishers.add(Publisher(relay))
    rows = [
        _row(name, [_sent(near, distant, received, wake) for _ in range(rounds + 1)][1:])
        for name, wake in (("of as many keys", _of_many_keys), ("eight of each key", _of_few_keys))
    ]
    channel.close()
    yield Part(
        "far",
        f"{MANY} woken tasks, sent by one process to another worker; the store is"
        f" {2 * ONE_WAY * 1e3:.0f} ms away",
        "tasks/s",
        ["all of them"],
        rows,
    )


class Publisher:
    """Pushes what is woken, as an app does."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def __call__(self, wake: WokenTask) -> bool:
        return self._relay.push(wake, MESSAGE)

    def push_together(self, wakes: list[WokenTask]) -> set[str]:
        return self._relay.push_together([(wake, MESSAGE) for wake in wakes])


def _row(name: str, times: list[float]) -> Row:
    seconds = median(times)
    return Row(name, Figure(MANY / seconds, at_least=20.0), [Figure(seconds, "s")])


def _sent(
    near: QueueStore,
    distant: QueueStore,
    received: Any,
    woken: Callable[[QueueStore], list[WokenTask]],
) -> float:
    wakes = woken(near)
    begin = time.perf_counter()
    for _ in distant.dispatch_each(wakes, lambda _: None, PATIENCE):
        pass
    for _ in range(MANY):
        received.acquire()
    return time.perf_counter() - begin


def _of_many_keys(store: QueueStore) -> list[WokenTask]:
    return [_woken(store, 1) for _ in range(MANY)]


def _of_few_keys(store: QueueStore) -> list[WokenTask]:
    return [_woken(store, EIGHT) for _ in range(MANY // EIGHT)]


def _woken(store: QueueStore, count: int) -> WokenTask:
    """Return the *count* runs that the release of a new key wakes there."""
    key = uuid.uuid4().hex
    park_request = ParkRequest(b"x" * 1300, task="shop.reserve")
    owner, want = uuid.uuid4().hex, Want(1, MANY)
    store.acquire(AcquireRequest(key, owner, 600.0, want=Want(MANY, MANY)))
    for _ in range(count):
        run = f"{uuid.uuid4()}:0:0:0"
        park = AcquireRequest(key, "", 600.0, queue=park_request, run=run, want=want)
        store.acquire(park)
    wake = store.release(ReleaseRequest(key, owner)).wake
    assert wake is not None
    assert len(wake.also) == count - 1
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
