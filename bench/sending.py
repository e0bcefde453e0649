"""What it costs to send a call through the store."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from figures import Figure, Part, Row, in_turn, median, ratio

from celery_distlock import Lock
from celery_distlock.errors import LockLostError
from celery_distlock.testing import EmbeddedServer

CALLS = 500  # in one round


def sending(server: EmbeddedServer, rounds: int) -> Iterator[Part]:
    from app import locked, plain

    taken = f"taken-{uuid.uuid4().hex}"

    def via_store(argument: str) -> None:
        locked.apply_async((argument,), lock_via="store")

    with server.client() as client, suppress(LockLostError):  # what is queued goes with the lock
        works = {
            "plain": partial(_time, client, plain.delay, _fresh),
            "free": partial(_time, client, via_store, _fresh),
            "queued": partial(_time, client, via_store, lambda: taken),
        }
        with Lock(f"noop:{taken}", lease=600.0, store=server.url):
            times = in_turn(works, rounds)
            client.delete(*client.keys(f"distlock:{{noop:{taken}}}:*"))
    yield Part(
        "sending",
        f"Sending {CALLS} calls of a task that does nothing",
        "time / a plain delay()",
        ["this", "plain"],
        [
            _row("through the store, its key is free", times["free"], times["plain"], 1.35),
            _row("through the store, its key is taken", times["queued"], times["plain"], 0.90),
        ],
    )


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


def _row(name: str, ours: list[float], plain: list[float], goal: float) -> Row:
    figures = [Figure(median(times) * 1e6, "µs", 0) for times in (ours, plain)]
    return Row(name, Figure(ratio(ours, plain), at_most=goal), figures)
