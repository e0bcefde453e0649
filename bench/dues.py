"""How late the ticker is with keys that time opens: ten thousand within one second."""

import threading
import time
from collections.abc import Iterator

from figures import Figure, Part, Row
from team import Team

from celery_distlock.keys import key_of
from celery_distlock.stores import open_store
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import ParkRequest, WokenTask
from celery_distlock.testing import EmbeddedServer
from celery_distlock.worker.ticker import Ticker

WITHIN = 1.0  # seconds in which all of them become due
SIZES = (1_000, 10_000)
PREPARING = 0.004  # seconds a key that preparing it takes at most, on a slow machine
LIMIT = 120.0  # seconds


def dues(server: EmbeddedServer, _rounds: int) -> Iterator[Part]:
    yield Part(
        "dues",
        "Keys that rest, with a parked task each, and become due within one second",
        "all have come within / one second",
        ["median lag", "p99 lag"],
        [_row(size, _lags(server, size)) for size in SIZES],
    )


def _row(size: int, lags: list[float]) -> Row:
    last = WITHIN + max(lags)
    middle, high = lags[size // 2], lags[size * 99 // 100]
    figures = (
        Figure(middle * 1000, "ms", 0),
        Figure(high * 1000, "ms", 0, at_most=100.0 if size == max(SIZES) else None),
    )
    return Row(f"{size:,} keys", Figure(last / WITHIN), figures)


def _lags(server: EmbeddedServer, size: int) -> list[float]:
    """Return how late each task comes to the worker that has parked it, in order."""
    came: dict[str, float] = {}
    ended = threading.Event()
    prefix = f"dues{size}"
    store = open_store(server.url, prefix)
    assert isinstance(store, RedisStore)

    def receive(wake: WokenTask) -> None:
        came[key_of(wake.name)] = time.monotonic()
        if len(came) == size:
            ended.set()

    channel = store.channels.open_channel(receive)
    begin = time.monotonic() + size * PREPARING
    due = {f"k{number}": begin + WITHIN * number / size for number in range(size)}
    for key, at in due.items():
        _rest(store, key, at, channel.address)
    with Team(1) as team:  # the ticker is another worker's
        team.submit(0, _tick, server.url, prefix, due["k0"] + LIMIT)
        assert ended.wait(LIMIT), f"{len(came)} of {size} came"
        team.hear(0)
    store.close()
    return sorted(came[key] - at for key, at in due.items())


def _tick(url: str, prefix: str, until: float) -> None:
    """Be the ticker until all is done."""
    store = open_store(url, prefix)
    assert isinstance(store, RedisStore)
    ticker = Ticker(store)
    ticker.start()
    while time.monotonic() < until and store.timetable.dues().many:
        time.sleep(0.5)
    ticker.stop()
    store.close()


def _rest(store: RedisStore, key: str, until: float, channel: str) -> None:
    """Park a run at a key that rests until then."""
    store.acquire(AcquireRequest(key, "owner", 60.0))
    queue = ParkRequest(b"x" * 600, channel)
    store.acquire(AcquireRequest(key, "", 60.0, queue=queue, run=f"run-{key}"))
    rest = ("resting:1", until - time.monotonic())
    store.release(ReleaseRequest(key, "owner", keep_for=rest))
