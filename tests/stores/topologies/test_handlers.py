"""Python calls a signal's handler between any two lines of what its thread does."""

from __future__ import annotations

import pytest

from celery_distlock import Lock
from tests.handlers import hangs_of

FIRST_REQUEST = {"pool", "_new_pool", "find", "_ask_all", "_new_map", "_ask_for_map", "_take"}


@pytest.fixture(params=["one", "sentinels", "cluster"])
def store(request, opened, redis_url):
    match request.param:
        case "one":
            return opened(redis_url)
        case "sentinels":
            return opened(request.getfixturevalue("shared_sentinels").url())
    return opened(request.getfixturevalue("shared_cluster").url)


def take(store, key: str, timeout: float = 10.0) -> None:
    lock = Lock(key, store=store)
    if lock.acquire(timeout=timeout):
        lock.release()


def disconnect(store) -> None:
    store.close()
    store.forget_connections()


def test_one_may_take_a_lock_while_its_thread_makes_the_first_request(store):
    hangs = hangs_of(
        lambda: take(store, "a"),
        lambda: take(store, "b"),
        FIRST_REQUEST,
        before=lambda: disconnect(store),
    )

    assert hangs == []


def test_one_may_wait_for_a_lock_while_its_thread_begins_or_ends_to_wait(opened, redis_url):
    store = opened(redis_url)
    with Lock("a", store=opened(redis_url)), Lock("b", store=opened(redis_url)):
        hangs = hangs_of(
            lambda: take(store, "a", timeout=0.01),
            lambda: take(store, "b", timeout=0.01),
            {"find", "want", "_open", "_reads", "_vacate", "_stop_reading"},
            before=lambda: disconnect(store),
        )

    assert hangs == []
