"""Fill a store with very many of one thing, and measure the work of its server."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Self

from cpu_time import server_cpu

from celery_distlock.stores import AcquireRequest, open_store
from celery_distlock.stores.redis.request_runner import Answered
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import ParkRequest
from celery_distlock.testing import EmbeddedServer
from celery_distlock.worker.ticker import Ticker

HOURS = 7200.0  # seconds; longer than any measurement
MESSAGE = ParkRequest(b"x" * 600, "", "shop.reserve", "celery")  # about what a small task has
AT_ONCE = 500  # requests in a pipeline
MODELS = 1_000  # keys whose records are made by requests; those of more keys are copies
COPY = """
local stem, first, last, models, index, kind = unpack(ARGV)
for number = first, last do
    for _, record in ipairs({ 'lock', 'queue', 'tasks', 'fence', 'later', 'calls' }) do
        local model = number % models
        redis.call('COPY', stem .. model .. '}:' .. record, stem .. number .. '}:' .. record)
    end
    redis.call('ZADD', index, 0, kind .. ':' .. number)
end
"""
INTERVAL = 2.0  # seconds between sweeps, the default


class Work(NamedTuple):
    """What a server has done: its commands and scripts, and seconds of CPU time."""

    commands: float
    scripts: float
    cpu: float

    @classmethod
    def of(cls, client: Any) -> Self:
        stats = client.info("commandstats")
        own = ("cmdstat_info", "cmdstat_client")
        calls = {name: each["calls"] for name, each in stats.items() if not name.startswith(own)}
        return cls(sum(calls.values()), calls.get("cmdstat_evalsha", 0), server_cpu(client))

    def since(self, before: "Work") -> "Work":
        return Work(*(now - then for now, then in zip(self, before, strict=True)))


class _RecordedError(Exception):
    """A request was recorded, and is sent later."""


class Pipeline:
    """The requests of a store's own methods, sent many at a time; leaving sends the rest."""

    def __init__(self, store: RedisStore) -> None:
        self._runner: Any = store._requests
        self._ask, self._calls = self._runner.ask, []

    def __enter__(self) -> Self:
        self._runner.ask = self._record
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        del self._runner.ask

    def add(self, request: Callable[[], object]) -> None:
        with suppress(_RecordedError):
            request()
        if len(self._calls) >= AT_ONCE:
            self._flush()

    def _record(self, calls: Any, what: Any, timeout: Any = None) -> Answered:
        self._calls += calls
        if any(call.script for call in calls):
            raise _RecordedError
        return Answered([1] * len(calls), 0.0, 0.0, 0, 0, ())

    def _flush(self) -> None:
        calls, self._calls = self._calls, []
        for answer in self._ask(calls, None).answers if calls else ():
            if isinstance(answer, Exception):
                raise answer


def opened(server: EmbeddedServer, prefix: str) -> RedisStore:
    store = open_store(server.url, prefix)
    assert isinstance(store, RedisStore)
    return store


def fill(store: RedisStore, first: int, last: int) -> None:
    """Hold keys, and park a task at each."""
    with Pipeline(store) as pipeline:
        for number in range(first, last):
            key, run = f"stock:{number}", f"{number:032x}:0:0:0"
            for request in (
                AcquireRequest(key, f"holder:{number}", HOURS),
                AcquireRequest(key, "", HOURS, MESSAGE, run),
            ):
                pipeline.add(lambda request=request: store.acquire(request))


def multiply(server: EmbeddedServer, store: RedisStore, kind: str, first: int, last: int) -> None:
    """Copy the records of the first `MODELS` keys, which requests have made, to others."""
    prefix = store._records.prefix
    with server.client(socket_timeout=None) as client:
        for begin in range(first, last, AT_ONCE):
            end = min(begin + AT_ONCE, last) - 1
            client.eval(
                COPY, 0, f"{prefix}:{{{kind}:", begin, end, MODELS, f"{prefix}:parked", kind
            )


def used_memory(server: EmbeddedServer) -> int:
    with server.client(socket_timeout=None) as client:
        return int(client.info("memory")["used_memory"])


def sweep(server: EmbeddedServer, store: RedisStore) -> tuple[float, Work]:
    """Return the seconds of one sweep, and the server's work for it."""
    with server.client(socket_timeout=None) as client:
        client.delete(f"{store._records.prefix}:sweeper")
        before, begin = Work.of(client), time.perf_counter()
        found = len(list(store.parking.sweep(INTERVAL)))
        took = time.perf_counter() - begin
        assert found == 0, f"{found} tasks were found at keys that are held"
        return took, Work.of(client).since(before)


def ticking(server: EmbeddedServer, store: RedisStore, seconds: float) -> Work:
    """Return the server's work for the ticker, in *seconds*."""
    ticker = Ticker(store)
    with server.client(socket_timeout=None) as client:
        ticker.start()
        time.sleep(seconds / 10)  # it has begun
        before = Work.of(client)
        time.sleep(seconds)
        work = Work.of(client).since(before)
    ticker.stop()
    return work
