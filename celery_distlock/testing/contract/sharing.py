"""Several processes at one store."""

import time

from celery_distlock import clock
from celery_distlock.engine.hold import believed
from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.parking import ParkingStore
from celery_distlock.stores.values import (
    RenewOutcome,
    WokenTask,
)

from .actions import (
    AGAIN,
    BUSY,
    DONE,
    GRANTED,
    PATIENCE,
    bound,
    expire,
    fair,
    holder,
    join_before_the_end,
    loose,
    park,
    parks,
    recognises,
    renew,
    shares,
    take,
    wait_for,
    wait_until,
    waits,
)
from .given import Given

__all__ = ["Sharing"]


class Sharing(Given):
    """What one process does at a key is so for all."""

    @shares
    def test_it_is_one_store_wherever_it_is_opened(self, store: Store, another: Store) -> None:
        assert another.identity == store.identity

    @shares
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

    @shares
    @loose
    def test_an_owner_is_an_acquisition_and_not_a_process(
        self, store: Store, another: Store
    ) -> None:
        token = take(store, "k", "a", 15.0)

        assert take(another, "k", "a") == token
        assert renew(another, ("k", "a", 60.0)) == [RenewOutcome.RENEWED]
        assert store.inspect("k").remaining > 30.0
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    @shares
    @bound
    def test_another_process_can_release_a_hold_and_no_more(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")

        assert another.acquire(AcquireRequest("k", "a", 30.0)).status is BUSY
        assert renew(another, ("k", "a", 30.0)) != [RenewOutcome.RENEWED]
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        assert another.release(ReleaseRequest("k", "a")).released
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]

    @shares
    def test_what_one_process_gives_up_another_can_take(self, store: Store, another: Store) -> None:
        first = take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert take(another, "k", "b") > first
        assert holder(store, "k") == "b"

    @shares
    def test_a_lease_ends_for_all(self, store: Store, another: Store) -> None:
        first = store.acquire(AcquireRequest("k", "a", self.shortest_lease))

        wait_until(
            lambda: another.acquire(AcquireRequest("k", "b", 30.0)).status is GRANTED, "the key"
        )

        assert clock.monotonic() >= first.asked_at + believed(self.shortest_lease)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.HELD]

    @shares
    @waits
    def test_a_waiter_learns_of_a_release_in_another_process(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        waiter = wait_for(another, "k", "b")

        store.release(ReleaseRequest("k", "a"))

        started = time.monotonic()
        waiter.inbox.wait(2 * PATIENCE)
        assert time.monotonic() - started < PATIENCE
        take(another, "k", "b", queue=waiter.inbox)

    @shares
    @waits
    @fair
    def test_a_queue_is_one_for_all_processes(self, store: Store, another: Store) -> None:
        take(store, "k", "a")
        here, there = wait_for(store, "k", "b"), wait_for(another, "k", "c")
        store.release(ReleaseRequest("k", "a"))

        assert another.acquire(AcquireRequest("k", "c", 30.0, queue=there.inbox)).status is BUSY
        take(store, "k", "b", queue=here.inbox)
        store.release(ReleaseRequest("k", "b"))
        take(another, "k", "c", queue=there.inbox)

    @shares
    @waits
    def test_a_waiter_whose_process_is_gone_is_passed_over(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        wait_for(another, "k", "dead", 1.0)
        alive = wait_for(store, "k", "alive")
        another.close()

        store.release(ReleaseRequest("k", "a"))

        wait_until(
            lambda: (
                store.acquire(AcquireRequest("k", "alive", 30.0, queue=alive.inbox)).status
                is GRANTED
            ),
            "the key to pass the one who is gone",
        )

    @shares
    @parks
    def test_a_run_parked_by_one_process_is_woken_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        park(another, "k", "run", b"envelope")

        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "run", b"envelope"
        )
        take(another, "k", "b", run="run")

    @shares
    @parks
    def test_of_all_processes_one_gets_to_sweep(
        self, store: ParkingStore, another: ParkingStore
    ) -> None:
        assert list(another.sweep(60.0)) == []
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run"), owner="dead"
        )
        expire(store, "k", "dead")

        assert list(store.sweep(60.0)) == []

    @shares
    @recognises
    def test_a_run_that_ended_in_one_process_is_recognised_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            another.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )
