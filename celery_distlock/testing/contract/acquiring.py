"""Tests of acquiring a key, and of fencing tokens."""

import threading

import pytest

from celery_distlock import clock
from celery_distlock.engine.hold import believed
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store

from .actions import BUSY, GRANTED, expire, holder, take, take_all, wait_until
from .given import Given

__all__ = ["Acquiring", "Tokens"]


class Acquiring(Given):
    """Grant a key to one owner at a time."""

    def test_a_free_key_is_granted(self, store: Store) -> None:
        before = clock.monotonic()

        reply = store.acquire(AcquireRequest("k", "a", 30.0))

        assert reply.status is GRANTED
        assert reply.token > 0
        assert reply.wake is None
        assert before <= reply.asked_at <= clock.monotonic()

    def test_a_taken_key_is_busy_and_names_its_holder(self, store: Store) -> None:
        token = take(store, "k", "a", run="run-a")

        reply = store.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.token, reply.holder, reply.holder_run) == (
            BUSY,
            token,
            "a",
            "run-a",
        )
        assert 0 < reply.remaining <= 30.0
        assert reply.place == 0
        assert store.inspect("k").waiting == 0

    def test_the_same_owner_asking_again_changes_nothing_but_the_end(self, store: Store) -> None:
        token = take(store, "k", "a", 15.0)

        assert take(store, "k", "a", 30.0) == token

        assert 15.0 < store.inspect("k").remaining <= 30.0
        assert store.release(ReleaseRequest("k", "a")).released
        assert not holder(store, "k")

    def test_keys_are_independent(self, store: Store) -> None:
        take(store, "k1", "a")
        take(store, "k2", "b")

        assert (holder(store, "k1"), holder(store, "k2")) == ("a", "b")

    def test_stores_with_other_prefixes_are_other_places(
        self, store: Store, elsewhere: Store
    ) -> None:
        take(store, "k", "a")

        take(elsewhere, "k", "b")
        assert elsewhere.identity != store.identity

    def test_one_of_many_threads_gets_the_key(self, store: Store) -> None:
        start = threading.Barrier(8)
        replies = []

        def ask(name: str) -> None:
            start.wait()
            replies.append(store.acquire(AcquireRequest("k", name, 30.0)))

        threads = [threading.Thread(target=ask, args=(f"t{n}",)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        statuses = [reply.status for reply in replies]
        assert (statuses.count(GRANTED), statuses.count(BUSY)) == (1, 7)

    def test_an_expired_key_is_free(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        take(store, "k", "b")

    def test_a_lease_lasts_for_as_long_as_its_holder_believes_in_it(self, store: Store) -> None:
        first = store.acquire(AcquireRequest("k", "a", self.shortest_lease))

        wait_until(
            lambda: store.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED, "the key"
        )

        assert clock.monotonic() >= first.asked_at + believed(self.shortest_lease)

    @pytest.mark.parametrize("lease", [0.001, 0.0001])
    def test_the_shortest_lease_is_granted_and_expires(self, store: Store, lease: float) -> None:
        take(store, "k", "a", lease)

        expire(store, "k")

    def test_the_longest_lease_is_granted(self, store: Store) -> None:
        take(store, "k", "a", self.longest_lease)

        left = store.inspect("k").remaining
        assert left == pytest.approx(self.longest_lease, rel=0.01, abs=5.0)

    @pytest.mark.parametrize("taken", "klm")
    def test_if_one_of_several_is_taken_none_is(self, store: Store, taken: str) -> None:
        take(store, taken, "z")

        assert take_all(store, "klm", "abc") is None
        assert [holder(store, key) for key in "klm"] == ["z" * (key == taken) for key in "klm"]


class Tokens(Given):
    """Give every grant a higher token than those before."""

    def test_tokens_rise_with_every_grant(self, store: Store) -> None:
        tokens = []
        for n in range(20):
            tokens.append(take(store, "k", f"o{n}"))
            store.release(ReleaseRequest("k", f"o{n}"))

        assert tokens == sorted(set(tokens))

    def test_tokens_rise_over_expiry(self, store: Store) -> None:
        first = take(store, "k", "a", self.shortest_lease)
        expire(store, "k")

        assert take(store, "k", "b") > first
