"""Tests of keys and runs of any text."""

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import (
    RenewOutcome,
)

from .actions import BUSY, HOSTILE_KEYS, hostile_keys, hostile_runs, renew, take
from .given import Given

__all__ = ["AnyText"]


class AnyText(Given):
    """Accept keys and runs of any text."""

    @hostile_keys
    def test_a_key_may_hold_any_text(self, store: Store, key: str) -> None:
        token = take(store, key, "a")
        assert store.acquire(AcquireRequest(key, "b", 30.0)).status is BUSY
        assert renew(store, (key, "a", 30.0)) == [RenewOutcome.RENEWED]
        assert store.inspect(key).token == token

        assert store.release(ReleaseRequest(key, "a")) == (True, None)
        assert not store.inspect(key).token

    def test_keys_that_look_alike_are_different(self, store: Store) -> None:
        keys = ["a", "A", "a ", "a\0", "{a}", "%61", "a?b", "a\ud801b", "\ufffd", "x" * 9_999]
        keys += HOSTILE_KEYS.values()

        tokens = {key: take(store, key, f"o{n}") for n, key in enumerate(keys)}

        assert {key: store.inspect(key).token for key in keys} == tokens

    @hostile_runs
    def test_a_holders_run_may_have_any_name(self, store: Store, run: str) -> None:
        take(store, "k", "a", run=run)

        assert store.acquire(AcquireRequest("k", "b", 30.0)).holder_run == run
        assert store.inspect("k").run == run
        assert store.release(ReleaseRequest("k", "a", run=run)).released
