"""What it costs to send a call through the store."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from figures import Figure, Part, Row, in_turn, median, ratio

from celery_distlock import Lock
from celery_distlock.errors import LockLostError
from celery_distlock.testing import EmbeddedServer

CALLS = 500  # in one round
CROWD = 10_000  # calls of one identity


def sending(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    from app import absent, locked, once_queued, plain, unique

    def via_store(argument: str) -> None:
        locked.apply_async((argument,), lock_via="store")

    with server.client() as client:
        timed = partial(_time, client)
        with _taken(server, client) as taken:
            works = {
                "plain": partial(timed, plain.delay, _fresh),
                "free": partial(timed, via_store, _fresh),
                "queued": partial(timed, via_store, lambda: taken),
                "unique": partial(timed, unique.delay, _fresh),
                "joined": partial(timed, unique.delay, lambda: taken),
                **{name: partial(timed, task.delay, _fresh) for name, task in once_queued.items()},
            }
            times = in_turn(works, rounds)
        with _taken(server, client) as taken:
            crowd = _crowd(client, unique.delay, taken)
    rivals = [
        _row(f"unique: sent / {name}", times["unique"], times[name], most)
        for name, most in (("celery-singleton", 1.0), ("celery-once", None))
        if name in times
    ]
    yield Part(
        "sending",
        f"Sending {CALLS} calls of a task that does nothing",
        "time / that of the other",
        ["this", "the other"],
        [
            _row("through the store, its key is free / plain", times["free"], times["plain"], 1.35),
            _row("..., its key is taken / plain", times["queued"], times["plain"], 0.90),
            *rivals,
            _row("unique: joined / plain", times["joined"], times["plain"], 0.35),
        ],
        [*absent, crowd],
    )


@contextmanager
def _taken(server: EmbeddedServer, client: Any) -> Iterator[str]:
    """Give an argument whose key is taken; what has come to wait there is thrown away."""
    argument = f"taken-{uuid.uuid4().hex}"
    with suppress(LockLostError), Lock(f"noop:{argument}", lease=600.0, store=server.url):
        yield argument
        client.delete(*client.keys(f"distlock:{{noop:{argument}}}:*"))


def _crowd(client: Any, call: Callable[[Any], object], argument: str) -> str:
    """Call one task often while its key is taken; say what that takes, and what it leaves."""
    call(argument)
    before, begin = _used_memory(client), time.perf_counter()
    for _ in range(CROWD):
        call(argument)
    each = (time.perf_counter() - begin) / CROWD
    waiting = client.zcard(f"distlock:{{noop:{argument}}}:queue")
    more = max(0, _used_memory(client) - before)
    return (
        f"{CROWD:,} calls of one identity while its key is taken: {waiting} waits, {each * 1e6:.0f}"
        f" µs a call, {more / 1024:.0f} kB more than one"
    )


def _used_memory(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def _fresh() -> str:
    return uuid.uuid4().hex


def _time(client: Any, send: Callable[[Any], object], argument: Callable[[], Any]) -> float:
    arguments = [argument() for _ in range(CALLS)]
    begin = time.perf_counter()
    for each in arguments:
        send(each)
    taken = (time.perf_counter() - begin) / CALLS
    client.delete("celery")
    return taken


def _row(name: str, ours: list[float], others: list[float], goal: float | None) -> Row:
    figures = [Figure(median(times) * 1e6, "µs", 0) for times in (ours, others)]
    return Row(name, Figure(ratio(ours, others), at_most=goal), figures)
