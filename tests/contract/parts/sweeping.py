"""What a sweep finds."""

from collections.abc import Callable

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    ParkRequest,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    PATIENCE,
    expire,
    holder,
    join_before_the_end,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept

__all__ = ["Sweeping"]


class Sweeping(Given):
    """A sweep finds what a crash left."""

    def test_a_sweep_finds_nothing_where_nothing_is(self, store: QueueStore) -> None:
        take(store, "k", "a")

        assert swept(store) == []

        assert holder(store, "k") == "a"

    def test_an_unsent_run_is_sent_by_a_sweep_after_its_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert swept(store) == []
        pass_time(2.0)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        assert swept(store) == []

    def test_a_run_that_was_sent_is_left_alone(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "sent")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.parking.mark_published(wake)
        take(store, "k2", "a")
        park(store, "k2", "unsent")
        store.release(ReleaseRequest("k2", "a"))
        pass_time(2.0)

        (wake,) = wait_until(lambda: swept(store), "the other one to be swept up")

        assert wake.run == "unsent"

    def test_a_sweep_frees_the_key_of_a_holder_that_died(self, store: QueueStore) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run", b"envelope"), owner="dead"
        )
        expire(store, "k", "dead")

        assert swept(store) == [WokenTask(slot_name("k"), "run", b"envelope")]
        assert holder(store, "k") == "parked:run"

    def test_a_sweep_hands_a_free_key_to_a_blocked_waiter_before_parked_ones(
        self, store: QueueStore
    ) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "b"), owner="dead"
        )
        park(store, "k", "run")
        expire(store, "k", "dead")

        assert swept(store) == []

        assert holder(store, "k") == "b" or not self.hands_over
        waiter.inbox.wait(PATIENCE)
        take(store, "k", "b", queue=waiter.inbox)

    def test_a_sweep_leaves_held_keys_alone(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")

        assert swept(store) == []

        assert (holder(store, "k"), store.inspect("k").waiting) == ("a", 1)

    def test_a_sweep_finds_every_key(self, store: QueueStore) -> None:
        for n in range(250):
            take(store, f"k{n}", "dead", self.shortest_lease)
            store.acquire(
                AcquireRequest(f"k{n}", "b", 30.0, queue=ParkRequest(b"e"), run=f"run{n}")
            )
        # Some were granted at once: their holders had expired already.
        waiting = [n for n in range(250) if store.inspect(f"k{n}").waiting]
        for n in waiting:
            expire(store, f"k{n}", "dead")

        found = wait_until(lambda: swept(store), "a sweep")

        assert {wake.run for wake in found} == {f"run{n}" for n in waiting}

    def test_of_all_sweepers_in_an_interval_one_gets_to_look(self, store: QueueStore) -> None:
        assert list(store.parking.sweep(60.0)) == []
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run"), owner="dead"
        )
        expire(store, "k", "dead")

        assert list(store.parking.sweep(60.0)) == []
