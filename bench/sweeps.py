"""What it costs to look through all keys with parked tasks for what a crash has left."""

import time
from collections.abc import Iterator
from typing import Any

from cpu_time import server_cpu
from figures import Figure, Part, Row, median

from celery_distlock.stores import AcquireRequest, open_store
from celery_distlock.stores.redis.parking import REST
from celery_distlock.stores.values import ParkRequest
from celery_distlock.testing import EmbeddedServer

SIZES = (1_000, 20_000, 200_000)
LONG = 100_000  # keys, from which on a sweep is measured once
INTERVAL = 2.0  # seconds, the default
CHUNK = 5_000  # keys that the server makes at a time

# Copies of a held key with a parked task.
MAKE = """
for number = ARGV[1], ARGV[2] do
    for _, record in ipairs({'lock', 'queue', 'tasks'}) do
        redis.call('COPY', 'sweeps:{first}:' .. record, 'sweeps:{k' .. number .. '}:' .. record)
    end
    redis.call('ZADD', 'sweeps:parked', 0, 'k' .. number)
end
"""
CLEAR = """
for number = ARGV[1], ARGV[2] do
    local stem = 'sweeps:{k' .. number .. '}:'
    redis.call('UNLINK', stem .. 'lock', stem .. 'queue', stem .. 'tasks')
end
"""


def sweeps(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    store = open_store(server.url, "sweeps")
    rows = []
    _park(store, "first")
    with server.client() as client:
        made = 0
        for size in SIZES:
            _in_chunks(client, MAKE, made, size)
            made = size
            times = 1 if size >= LONG else rounds
            rows.append(_row(size, [_sweep(client, store) for _ in range(times)]))
        assert store.inspect(f"k{made - 1}").waiting == 1
        _in_chunks(client, CLEAR, 0, made)
        client.unlink("sweeps:parked", "sweeps:sweeper")
    yield Part(
        "sweeps",
        "Looking for what a crash has left: keys with a parked task each",
        "server CPU / time",
        ["a sweep", "server CPU of it", "from one to the next"],
        rows,
    )


def _row(size: int, measured: list[tuple[float, float]]) -> Row:
    took, cpu = (median(each) for each in zip(*measured, strict=True))
    period = max(INTERVAL, (1 + REST) * took)
    figures = Figure(took, "s", 3), Figure(cpu, "s", 3), Figure(period, "s", 1)
    return Row(f"{size:,} keys", Figure(cpu / period, at_most=0.25), figures)


def _sweep(client: Any, store: Any) -> tuple[float, float]:
    client.delete("sweeps:sweeper")
    before, begin = server_cpu(client), time.perf_counter()
    assert not list(store.parking.sweep(INTERVAL))
    return time.perf_counter() - begin, server_cpu(client) - before


def _in_chunks(client: Any, script: str, first: int, last: int) -> None:
    for begin in range(first, last, CHUNK):
        client.eval(script, 0, begin, min(begin + CHUNK, last) - 1)


def _park(store: Any, key: str) -> None:
    store.acquire(AcquireRequest(key, "holder", 3600.0))
    park_request = ParkRequest(b"x" * 600, task="shop.reserve")
    store.acquire(AcquireRequest(key, "waiter", 1.0, queue=park_request, run="run"))
