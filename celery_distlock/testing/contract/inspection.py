"""Tests of the inspection of one key, and of the store's check."""

import time

import pytest

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.findings import Severity
from celery_distlock.stores.values import ALONE

from .actions import expire, take
from .given import Given

__all__ = ["Inspection"]


class Inspection(Given):
    """Inspect a key without changing it."""

    @pytest.mark.parametrize("timeout", [None, 10.0])
    def test_a_look_at_a_free_key(self, store: Store, timeout: float | None) -> None:
        state = store.inspect("k", timeout)

        assert (state.owner, state.token, state.run, state.waiting) == ("", 0, "", 0)
        assert state.remaining == 0.0

    @pytest.mark.parametrize("timeout", [None, 10.0])
    def test_a_look_at_a_held_key(self, store: Store, timeout: float | None) -> None:
        token = take(store, "k", "a", run="run")

        state = store.inspect("k", timeout)

        assert (state.owner, state.token, state.run, state.waiting) == ("a", token, "run", 0)
        assert abs(state.since - time.time()) < 60
        assert 0 < state.remaining <= 30.0

    def test_a_look_shows_whether_a_request_would_be_granted(self, store: Store) -> None:
        _, before = store.inspect_for("k", ALONE, 10.0)
        token = take(store, "k", "a")
        state, admits = store.inspect_for("k", ALONE, 10.0)

        assert before
        assert (state.owner, state.token, admits) == ("a", token, False)

    def test_looking_takes_nothing(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        assert store.inspect("k") == store.inspect("k")
        take(store, "k", "b")

    def test_a_working_store_passes_its_check(self, store: Store) -> None:
        assert all(finding.severity is not Severity.BAD for finding in store.check())

    def test_a_check_leaves_keys_alone(self, store: Store) -> None:
        token = take(store, "k", "a")

        store.check()

        assert store.inspect("k").token == token

    def test_a_store_may_be_used_after_it_was_closed(self, store: Store) -> None:
        take(store, "k", "a")
        store.close()
        store.close()

        take(store, "another key", "b")
        assert store.release(ReleaseRequest("another key", "b")).released
