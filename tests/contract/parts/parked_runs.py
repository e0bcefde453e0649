"""Parked runs as operators see them."""

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.base import Store
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import SendRequest
from celery_distlock.stores.values import (
    Completion,
    Limit,
    ParkRequest,
    Release,
    Route,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    BUSY,
    DONE,
    found_keys,
    holder,
    hostile_runs,
    take,
    wait_for,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import any_envelope, park

__all__ = ["ParkedRuns"]


class ParkedRuns(Given):
    """Find parked runs, list and cancel them."""

    @any_envelope
    def test_a_parked_run_is_among_the_waiters(self, store: QueueStore, envelope: bytes) -> None:
        take(store, "k", "a")
        park(store, "k", "run", envelope)

        (waiter,) = store.waiters("k")

        whole = store.parking.parked("k", "run")
        assert whole is not None
        assert whole.envelope == envelope
        assert waiter == whole._replace(envelope=b"")  # which may be large
        assert store.parking.parked("k", "another") is None
        assert (waiter.owner, waiter.run, waiter.task) == ("", "run", "shop.reserve")
        assert not waiter.woken
        assert waiter.since == pytest.approx(store.inspect("k").oldest, abs=0.01)

    def test_waiters_are_listed_in_order_and_by_pages(self, store: ListingStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        blocked = wait_for(store, "k", "b")
        park(store, "k", "run2")

        assert [(w.run or w.owner) for w in store.waiters("k")] == ["run1", "b", "run2"]
        assert [(w.run or w.owner) for w in store.waiters("k", first=1, limit=1)] == ["b"]
        assert store.waiters("k", first=3) == []
        blocked.inbox.close()

    def test_runs_are_counted_by_the_destination_of_their_messages(self, store: QueueStore) -> None:
        take(store, "k", "a")
        woken, *_ = runs = [f"run{number}" for number in range(4)]
        for number, run in enumerate(runs):
            park_request = ParkRequest(b"e", destination=f" queue{number % 2}")
            store.acquire(AcquireRequest("k", "d", 30.0, queue=park_request, run=run))
        blocked = wait_for(store, "k", "b")
        store.parking.park_if_held("k", "run4", ParkRequest(b"e", destination=" queue1"), 1.0)
        for run, delay in (("sent", 0.0), ("later", 60.0)):
            park_request = ParkRequest(b"e", destination="amq.topic shop.#")
            store.calls.send(SendRequest("k", run, park_request, delay=delay))
        assert store.release(ReleaseRequest("k", "a")).wake is not None

        found, none = store.parking.destinations(["k", "another"])

        assert found.waiting == {" queue0": 1, " queue1": 3, "": 1, "amq.topic shop.#": 1}
        assert found.woken == {" queue0": 1}
        assert found.later == {"amq.topic shop.#": 1}
        assert none == ({}, {}, {})
        assert store.inspect("k").woken == 1
        assert woken in {waiter.run for waiter in store.waiters("k")}
        blocked.inbox.close()

    def test_a_run_of_several_keys_is_counted_where_it_waits(self, store: QueueStore) -> None:
        take(store, "l", "a")
        route = Route(("k", "l"), "shop.move", destination=" orders")
        queue_store.reserve_or_queue(store, StandRequest("run", route, 0, ParkRequest(b"e")))

        here, there = store.parking.destinations(["k", "l"])

        assert here == ({}, {}, {})
        assert there.waiting == {" orders": 1}
        waiter = store.parking.parked("l", "run")
        assert waiter is not None
        assert waiter.route == route

    def test_of_many_runs_the_destinations_are_in_proportion(self, store: QueueStore) -> None:
        take(store, "k", "a")
        for number in range(300):
            where = " rare" if number % 10 == 0 else " common"
            park_request = ParkRequest(b"e", destination=where)
            store.parking.park_if_held("k", f"run{number}", park_request, 1.0)

        (found,) = store.parking.destinations(["k"])

        assert 5 <= found.waiting[" rare"] <= 15
        assert sum(found.waiting.values()) == 100

    def test_a_run_in_flight_is_listed_as_woken(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")
        store.release(ReleaseRequest("k", "a"))

        woken, queued = store.waiters("k")

        assert (woken.run, woken.woken) == ("run1", True)
        assert (queued.run, queued.woken) == ("run2", False)
        assert store.parking.parked("k", "run1") == woken._replace(envelope=b"run1")
        assert (store.inspect("k").woken, store.inspect("k").task) == (1, "shop.reserve")
        assert found_keys(store) == ["k"]

    def test_runs_in_flight_are_listed_by_pages(self, store: ListingStore) -> None:
        QueueStore.of(store).units.set_limit("k", Limit(0))
        for number in range(6):
            park(store, "k", f"run{number}", want=Want(1, 5))
        QueueStore.of(store).units.set_limit("k", None)
        take(store, "k", "a", run="run1", redelivered=True, retain=True, want=Want(1, 5))

        pages = [store.waiters("k", first=first, limit=2) for first in (0, 2, 4)]

        runs = [sorted(waiter.run for waiter in page) for page in pages]
        woken = [run for page in pages for waiter in page if (run := waiter.run) and waiter.woken]
        assert [len(page) for page in runs] == [3, 2, 0]
        assert sorted(woken) == ["run0", "run2", "run3", "run4"]
        assert [waiter.run for waiter in pages[0] if not waiter.woken] == ["run5"]

    def test_a_run_that_came_is_not_in_flight(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        take(store, "k", "b", run="run", redelivered=True, retain=True)

        assert store.inspect("k").woken == 0

    def test_a_task_is_not_found_by_what_its_id_begins_with(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "import:42:0:0:0")

        assert list(store.parking.find_parked("import")) == []
        assert list(store.parking.find_parked("import:42")) == [("k", "import:42:0:0:0")]

    @hostile_runs
    def test_a_parked_task_is_found_by_its_id(self, store: QueueStore, run: str) -> None:
        take(store, "k", "a")
        take(store, "l", "a")
        park(store, "k", f"{run}:0:0:0")
        park(store, "l", f"{run}:1:0:0")
        park(store, "l", f"{run}x:0:0:0")

        assert list(store.parking.find_parked(run, "k")) == [("k", f"{run}:0:0:0")]
        assert list(store.parking.find_parked(run, "m")) == []
        found = sorted(store.parking.find_parked(run))

        assert found == [("k", f"{run}:0:0:0"), ("l", f"{run}:1:0:0")]

    def test_what_is_in_flight_is_found_again_at_once(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.parking.mark_published(wake)

        (again,) = store.parking.wake_again("k")

        assert again == wake
        assert list(store.parking.find_parked("nobody")) == []

    def test_nothing_is_woken_again_that_has_come_or_waits_for_a_holder(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")

        assert list(store.parking.wake_again("k")) == []
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run", redelivered=True, retain=True)
        assert list(store.parking.wake_again("k")) == []

    def test_nothing_is_parked_at_a_key_that_was_never_taken(self, store: QueueStore) -> None:
        assert list(store.parking.find_parked("task")) == []
        assert store.parking.parked("k", "run") is None
        assert list(store.parking.wake_again("k")) == []
        assert not store.parking.cancel("k", "run").released

    def test_what_has_ended_is_not_woken_again_while_its_result_is_stored(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run", redelivered=True, retain=True)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))

        assert list(store.parking.wake_again("k")) == []
        assert (
            store.acquire(AcquireRequest("k", "c", 30.0, run="run", redelivered=True)).status
            is BUSY
        )

    def test_a_parked_run_that_is_cancelled_does_not_run(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")

        assert store.parking.cancel("k", "run1") == Release(True)

        assert [waiter.run for waiter in store.waiters("k")] == ["run2"]
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run1", redelivered=True)).status
            is DONE
        )

    def test_a_run_in_flight_that_is_cancelled_leaves_the_key_to_the_next(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")
        store.release(ReleaseRequest("k", "a"))

        cancelled = store.parking.cancel("k", "run1")

        assert cancelled == Release(True, WokenTask(slot_name("k"), "run2", b"run2"))
        assert [waiter.run for waiter in store.waiters("k")] == ["run2"]

    def test_a_run_that_has_come_is_not_cancelled(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        token = take(store, "k", "b", run="run", redelivered=True, retain=True)

        assert not store.parking.cancel("k", "run").released
        assert store.inspect("k").token == token
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        assert not store.parking.cancel("k", "run").released

    def test_nothing_is_cancelled_that_is_not_parked(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run")

        assert not store.parking.cancel("k", "another").released
        assert not store.parking.cancel("l", "run").released
        assert holder(store, "k") == "a"
