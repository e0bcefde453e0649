"""Tests of renewals."""

from collections.abc import Callable

import pytest

from celery_distlock import clock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import (
    Ownership,
    RenewOutcome,
)

from .actions import BUSY, expire, holder, renew, take, wait_until
from .given import Given

__all__ = ["Renewing"]


class Renewing(Given):
    """Let only the holder of a key extend its lease."""

    def test_a_holder_renews(self, store: Store) -> None:
        take(store, "k", "a", 15.0)
        before = clock.monotonic()

        ((outcome, asked_at),) = store.renew([Ownership("k", "a", 30.0)], 10.0)

        assert outcome is RenewOutcome.RENEWED
        assert before <= asked_at <= clock.monotonic()
        assert store.inspect("k").remaining > 15.0

    def test_what_was_renewed_outlives_its_first_lease(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        wait_until(  # on a busy machine, the lease may end before the request
            lambda: (
                take(store, "k", "a", 1.0)
                and renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
            ),
            "a renewal in time",
        )

        pass_time(1.5)

        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY

    def test_renewing_keeps_the_token(self, store: Store) -> None:
        token = take(store, "k", "a")

        renew(store, ("k", "a", 30.0))

        assert store.inspect("k").token == token

    def test_a_key_of_another_holder_is_not_renewed(self, store: Store) -> None:
        take(store, "k", "b", 15.0)

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]

        assert holder(store, "k") == "b"
        assert store.inspect("k").remaining <= 15.0

    @pytest.mark.parametrize("end", ["never", "released", "expired"])
    def test_renewing_never_creates_a_lock_again(self, store: Store, end: str) -> None:
        if end == "released":
            take(store, "k", "a")
            store.release(ReleaseRequest("k", "a"))
        elif end == "expired":
            take(store, "k", "a", self.shortest_lease)
            expire(store, "k")

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

        assert not store.inspect("k").token

    def test_each_of_many_renewals_has_its_own_outcome(self, store: Store) -> None:
        take(store, "k1", "a")
        take(store, "k2", "b")
        holds = [("k1", "a", 30.0), ("k2", "a", 30.0), ("k3", "a", 30.0), ("k1", "a", 30.0)]

        assert renew(store, *holds) == [
            RenewOutcome.RENEWED,
            RenewOutcome.HELD,
            RenewOutcome.LOST,
            RenewOutcome.RENEWED,
        ]

    def test_nothing_to_renew_is_no_error(self, store: Store) -> None:
        assert store.renew([], 10.0) == []
