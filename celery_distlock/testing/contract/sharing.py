"""Tests of several processes that use one store."""

from celery_distlock import clock
from celery_distlock.engine.hold import believed
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import (
    RenewOutcome,
)

from .actions import BUSY, GRANTED, holder, renew, take, wait_until
from .given import Given

__all__ = ["Sharing"]


class Sharing(Given):
    """Show all processes the same holders."""

    def test_it_is_one_store_wherever_it_is_opened(self, store: Store, another: Store) -> None:
        assert another.identity == store.identity

    def test_what_one_process_holds_another_cannot_take(self, store: Store, another: Store) -> None:
        token = take(store, "k", "a", run="run-a")

        reply = another.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.token, reply.holder, reply.holder_run) == (
            BUSY,
            token,
            "a",
            "run-a",
        )
        assert holder(another, "k") == "a"

    def test_an_owner_is_an_acquisition_and_not_a_process(
        self, store: Store, another: Store
    ) -> None:
        token = take(store, "k", "a", 15.0)

        assert take(another, "k", "a") == token
        assert renew(another, ("k", "a", 60.0)) == [RenewOutcome.RENEWED]
        assert store.inspect("k").remaining > 30.0
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    def test_what_one_process_gives_up_another_can_take(self, store: Store, another: Store) -> None:
        first = take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert take(another, "k", "b") > first
        assert holder(store, "k") == "b"

    def test_a_lease_ends_for_all(self, store: Store, another: Store) -> None:
        first = store.acquire(AcquireRequest("k", "a", self.shortest_lease))

        wait_until(
            lambda: another.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED, "the key"
        )

        assert clock.monotonic() >= first.asked_at + believed(self.shortest_lease)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]
