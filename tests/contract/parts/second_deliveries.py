"""Second deliveries that are parked."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Completion, WokenTask
from celery_distlock.testing.contract.actions import (
    AGAIN,
    DONE,
    YES,
    expire,
    join_before_the_end,
    take,
    unsettled,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept

__all__ = ["ParkedDeliveries"]


class ParkedDeliveries(Given):
    """Park the second delivery of a run, which may have ended."""

    def test_a_parked_second_delivery_of_a_finished_run_is_dropped(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", redelivered=True)
        park(store, "k", "other")

        wake = store.release(ReleaseRequest("k", "a", run="run", completion=YES)).wake

        assert wake is not None
        assert wake.run == "other"
        assert store.inspect("k").waiting == 0
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    def test_a_parked_second_delivery_of_a_run_that_died_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", b"again", redelivered=True)

        assert store.release(ReleaseRequest("k", "a", run="run")).wake == WokenTask(
            slot_name("k"), "run", b"again"
        )
        take(store, "k", "b", run="run", redelivered=True)

    def test_a_second_delivery_whose_turn_has_come_does_not_run_when_the_first_has_ended(
        self, store: QueueStore
    ) -> None:
        join_before_the_end(
            store,
            self.shortest_lease,
            lambda: park(store, "k", "run", redelivered=True),
            run="run",
        )
        park(store, "k", "other")
        expire(store, "k")
        (wake,) = wait_until(lambda: swept(store), "the free key to be handed over")
        assert wake.run == "run"
        store.release(
            ReleaseRequest("k", "a", run="run", completion=AGAIN)
        )  # it had lost its lease, and has ended

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert reply.status is DONE
        assert reply.wake is not None
        assert reply.wake.run == "other"

    def test_the_parked_second_delivery_of_an_unsettled_run_is_held_back(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", redelivered=True)
        park(store, "k", "other")

        wake = store.release(
            ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED)
        ).wake

        assert wake is not None
        assert wake.run == "other"
        assert swept(store) == []

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_the_second_delivery_of_a_run_that_is_settled_is_dropped(
        self, store: QueueStore, when: str, pass_time: Callable[[float], None]
    ) -> None:
        unsettled(store)
        if when == "before":
            park(store, "k", "run", redelivered=True)
        assert store.drop(WokenTask(slot_name("k"), "run", b"")).released

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )
        pass_time(120.0)
        assert swept(store) == []

    @pytest.mark.parametrize("parked", ["before its end", "after its end"])
    def test_the_second_delivery_of_a_run_that_is_never_settled_runs(
        self, store: QueueStore, parked: str, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", run="run")
        if parked == "before its end":
            park(store, "k", "run", b"again", redelivered=True)
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))
        if parked == "after its end":
            park(store, "k", "run", b"again", redelivered=True)
        assert swept(store) == []

        pass_time(31.0)

        found = wait_until(lambda: swept(store), "the run to be swept up")
        assert found == [WokenTask(slot_name("k"), "run", b"again")]
        take(store, "k", "b", run="run", redelivered=True)
