"""To look at what is parked costs nothing that depends on how large it is."""

from __future__ import annotations

import json
import tracemalloc
import zlib
from contextlib import closing

import pytest
from celery import Celery
from kombu.message import Message

from celery_distlock.runtime.message_facts import LockHeader
from celery_distlock.runtime.messages import seal_message, to_message
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.values import ParkRequest

MUCH = 50_000_000  # bytes


@pytest.fixture
def bomb() -> bytes:
    """The envelope of a small body that says of itself that it is compressed, which it is not."""
    made = Message(
        body=zlib.compress(b" " * MUCH, 9),
        content_type="application/json",
        content_encoding="utf-8",
        headers={"id": "id", "task": "shop.reserve"},
        delivery_info={"exchange": "", "routing_key": "celery"},
    )
    made.headers["compression"] = "application/x-gzip"
    return seal_message(made, LockHeader())


def test_the_body_of_an_envelope_is_not_decompressed(bomb):
    with closing(Celery(broker="memory://", set_as_current=False)) as app:
        tracemalloc.start()
        message = to_message(app, json.loads(bomb))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert peak < MUCH / 10
    assert len(message.body) < MUCH / 10
    assert message.headers["compression"] == "application/x-gzip"  # as a sender needs it


def test_the_envelopes_of_waiters_are_not_fetched(redis_url, prefix):
    with closing(RedisStore(redis_url, prefix)) as store:
        store.acquire(AcquireRequest("k", "o", 60.0))
        for number in range(5):
            park_request = ParkRequest(b"x" * 1_000_000, task="shop.reserve")
            store.acquire(
                AcquireRequest("k", "d", 1.0, queue=park_request, run=f"id{number}:0:0:0")
            )
        tracemalloc.start()
        waiters = store.waiters("k")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert [waiter.task for waiter in waiters] == ["shop.reserve"] * 5
    assert peak < 500_000


def test_a_run_that_was_parked_without_its_tasks_name_is_listed_without_one(redis_url, prefix):
    with closing(RedisStore(redis_url, prefix)) as store:
        store.acquire(AcquireRequest("k", "o", 60.0))
        store.acquire(AcquireRequest("k", "d", 1.0, queue=ParkRequest(b"{}"), run="id:0:0:0"))

        (waiter,) = store.waiters("k")

    assert (waiter.run, waiter.task) == ("id:0:0:0", "")
