"""Lists, looks and counters where each is plain commands."""

from __future__ import annotations

import pytest

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.redis.scriptless import ScriptlessStore
from celery_distlock.stores.values import Status
from tests import servers

MONTH = 30 * 86400  # seconds


def take(store, *keys):
    for key in keys:
        assert store.acquire(AcquireRequest(key, "a", 30.0)).status is Status.GRANTED


def found(store, pattern="*"):
    return sorted(key for keys in store.find_keys(pattern) for key in keys)


def test_records_that_are_no_locks_are_not_listed(redis_server, store, prefix):
    take(store, "k")
    store.count({"acquired||t": 1.0})
    with redis_server.client() as client:
        client.set(f"{prefix}:notes", "1")
        client.set(f"{prefix}x:{{k}}:lock", "1")

    assert found(store) == ["k"]


def test_a_key_that_is_not_granted_yet_has_no_holder(redis_server, store, prefix):
    with redis_server.client() as client:
        client.set(f"{prefix}:{{k}}:lock", '{"owner": "a", "run": "", "token": 0}', px=60_000)

    (state,) = store.inspect_many(["k"])

    assert (state.owner, state.token, state.waiting) == ("", 0, 0)


def test_a_look_at_many_keys_takes_a_round_trip_for_a_hundred(store, monkeypatch):
    take(store, "k0")
    asked = []
    exchange = store._servers.exchange
    monkeypatch.setattr(
        store._servers, "exchange", lambda *words: asked.append(1) or exchange(*words)
    )

    store.inspect_many([f"k{number}" for number in range(250)])

    assert len(asked) == 3


def test_foreign_records_are_reported_as_that(redis_server, store, prefix):
    with redis_server.client() as client:
        client.hset(f"{prefix}:{{k}}:lock", "x", servers.grant("a"))
        client.set(f"{prefix}:{{l}}:lock", "?")

    with pytest.raises(StoreError, match="another type"):
        store.inspect("k")
    with pytest.raises(StoreError, match="is not ours"):
        store.inspect("l")


def test_counters_go_a_month_after_the_last_count(redis_server, store, prefix):
    store.count({"acquired||t": 1.0})

    with redis_server.client() as client:
        assert MONTH - 60 < client.ttl(f"{prefix}:counts") <= MONTH


def test_a_count_is_asked_once(store, monkeypatch):
    take(store, "k")
    asked = []

    def lose(calls, _timeout):
        asked.append(calls)
        return [ConnectionResetError("lost")] * len(calls)

    monkeypatch.setattr(store._servers, "exchange", lose)

    with pytest.raises(StoreUnavailableError):
        store.count({"acquired||t": 1.0, "woken||t": 2.0})

    assert len(asked) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: list(store.find_keys()),
        lambda store: store.inspect_many(["k"]),
        lambda store: store.count({"acquired||t": 1.0}),
        lambda store: store.counts(),
    ],
    ids=["find_keys", "look", "count", "counts"],
)
def test_a_server_that_is_unreachable_is_said_to_be(ask):
    store = ScriptlessStore("redis://127.0.0.1:1?scripts=off", servers.new_prefix())

    with pytest.raises(StoreUnavailableError, match=r"127\.0\.0\.1:1"):
        ask(store)
