"""Messages that are delivered a second time."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.parking import ParkingStore
from celery_distlock.stores.values import (
    Completion,
    WokenTask,
)

from .actions import (
    AGAIN,
    BUSY,
    DONE,
    YES,
    expire,
    fair,
    holder,
    join_before_the_end,
    park,
    parks,
    recognises,
    swept,
    take,
    unsettled,
    wait_for,
    wait_until,
    waits,
)
from .given import Given

__all__ = ["SecondDeliveries"]


class SecondDeliveries(Given):
    """A run that has ended is not run again, and one that died is."""

    @recognises
    def test_a_second_delivery_of_a_finished_run_is_recognised(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

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

    def test_a_second_delivery_does_not_run_beside_the_first(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")

    @parks
    @recognises
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

    @parks
    @recognises
    def test_a_parked_second_delivery_of_a_run_that_died_runs(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "run", b"again", redelivered=True)

        assert store.release(ReleaseRequest("k", "a", run="run")).wake == WokenTask(
            slot_name("k"), "run", b"again"
        )
        take(store, "k", "b", run="run", redelivered=True)

    @waits
    @fair
    @recognises
    @pytest.mark.parametrize("ended", [AGAIN, Completion.UNSETTLED])
    def test_a_second_delivery_that_blocks_does_not_run_when_the_first_has_ended(
        self, store: Store, ended: Completion
    ) -> None:
        take(store, "k", "a", run="run")
        waiter = wait_for(store, "k", "b", run="run", redelivered=True)
        other = wait_for(store, "k", "c")

        store.release(ReleaseRequest("k", "a", run="run", completion=ended))
        told = store.acquire(
            AcquireRequest("k", "b", 30.0, queue=waiter.inbox, run="run", redelivered=True)
        )

        assert told.status is (DONE if ended is AGAIN else BUSY)
        assert holder(store, "k") == "c" or not self.hands_over
        take(store, "k", "c", queue=other.inbox)
        store.release(ReleaseRequest("k", "c"))
        assert not holder(store, "k")

    @parks
    @recognises
    def test_a_second_delivery_whose_turn_has_come_does_not_run_when_the_first_has_ended(
        self, store: ParkingStore
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

        told = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert told.status is DONE
        assert told.wake is not None
        assert told.wake.run == "other"

    def test_an_unsettled_run_leaves_its_key_free(self, store: Store) -> None:
        unsettled(store)

        take(store, "k", "b", run="other")

    @recognises
    def test_the_second_delivery_of_an_unsettled_run_does_not_run(self, store: Store) -> None:
        unsettled(store)

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")
        assert 25.0 < reply.remaining < 30.1
        assert not holder(store, "k")

    @parks
    @recognises
    def test_the_parked_second_delivery_of_an_unsettled_run_is_held_back(
        self, store: ParkingStore
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

    @recognises
    def test_the_second_delivery_of_a_run_that_is_settled_is_recognised(self, store: Store) -> None:
        unsettled(store)
        assert store.drop(WokenTask(slot_name("k"), "run", b"")).released

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    @parks
    @recognises
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_the_second_delivery_of_a_run_that_is_settled_is_dropped(
        self, store: ParkingStore, when: str, pass_time: Callable[[float], None]
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

    @parks
    @recognises
    @pytest.mark.parametrize("parked", ["before its end", "after its end"])
    def test_the_second_delivery_of_a_run_that_is_never_settled_runs(
        self, store: ParkingStore, parked: str, pass_time: Callable[[float], None]
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

    @recognises
    def test_a_run_with_a_short_lease_has_five_seconds_to_be_settled(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 0.5, run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))

        pass_time(2.5)  # not more: real time passes too
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is BUSY
        )

        pass_time(2.6)
        take(store, "k", "b", run="run", redelivered=True)
