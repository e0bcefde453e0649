"""Tests of messages that are delivered a second time."""

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import (
    Completion,
)

from .actions import AGAIN, BUSY, take, unsettled
from .given import Given

__all__ = ["SecondDeliveries"]


class SecondDeliveries(Given):
    """Grant the key to a second delivery, unless the first one still runs."""

    def test_a_first_delivery_is_never_taken_for_a_second(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        take(store, "k", "b", run="run", redelivered=False)

    def test_a_second_delivery_of_a_run_that_has_not_ended_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.NO))

        take(store, "k", "b", run="run", redelivered=True)

    def test_a_second_delivery_of_another_run_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        take(store, "k", "b", run="other", redelivered=True)

    def test_a_second_delivery_does_not_run_during_the_first(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")

    def test_an_unsettled_run_leaves_its_key_free(self, store: Store) -> None:
        unsettled(store)

        take(store, "k", "b", run="other")
