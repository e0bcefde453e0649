"""Keys at which runs are parked: their release, their tokens, a look at them."""

import time

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.channels import PollingInbox
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import WokenTask
from celery_distlock.testing.contract.actions import (
    BUSY,
    YES,
    expire,
    grantees,
    join_before_the_end,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept

__all__ = ["Queues"]


class Queues(Given):
    """Release keys at which runs are parked, and look at them."""

    def test_a_queue_is_served_in_the_order_of_arrival(self, store: Store) -> None:
        take(store, "k", "first")
        arrivals, waiters = [], []
        for n in range(6):
            name = f"w{n}"
            if n % 2:
                park(store, "k", name)
            else:
                waiters.append(wait_for(store, "k", name))
            arrivals.append(name)
        assert store.inspect("k").waiting == 6

        served = []
        current, run = "first", ""
        for _ in arrivals:
            wake = store.release(ReleaseRequest("k", current, run=run, completion=YES)).wake
            if wake is not None:
                run = current = wake.run
                take(store, "k", current, run=run)
            else:
                run = ""
                (current,) = grantees(store, waiters, hands_over=self.hands_over)
                del waiters[0]
            served.append(current)

        assert served == arrivals

    def test_a_request_that_does_not_queue_learns_how_many_are_before_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        park(store, "k", "run")

        assert store.acquire(AcquireRequest("k", "c", 30.0)).place == 2

    def test_a_waiter_that_gives_up_just_as_he_is_served_passes_the_key_on(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        released = store.release(ReleaseRequest("k", "b", inbox=waiter.inbox))

        assert released.released or not self.hands_over
        assert released.wake is not None
        assert released.wake.run == "run"

    def test_a_waiter_that_cannot_be_notified_is_passed_over(self, store: Store) -> None:
        take(store, "k", "a")
        gone = PollingInbox("no-subscriber")
        assert store.acquire(AcquireRequest("k", "gone", 30.0, queue=gone)).status is BUSY
        waiter = wait_for(store, "k", "b")

        store.release(ReleaseRequest("k", "a"))

        take(store, "k", "b", queue=waiter.inbox)

    def test_tokens_rise_over_hand_overs(self, store: Store) -> None:
        tokens = [take(store, "k", "a")]
        waiter = wait_for(store, "k", "b")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        tokens.append(take(store, "k", "b", queue=waiter.inbox))
        store.release(ReleaseRequest("k", "b"))
        tokens.append(take(store, "k", "c", run="run"))

        assert tokens == sorted(set(tokens))

    def test_a_late_release_wakes_no_waiter(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")
        take(store, "k", "b")
        park(store, "k", "run")

        assert store.release(ReleaseRequest("k", "a")) == (False, None)

        assert store.inspect("k").waiting == 1

    def test_a_key_that_stays_locked_is_not_given_to_the_queue(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")
        park(store, "k", "other")

        released = store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0)))

        assert released == (True, None)
        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
        assert take(store, "k", "c", run="run") == token

    def test_a_key_that_was_kept_without_need_goes_to_the_next(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run")
        park(store, "k", "other")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", self.shortest_lease)))
        wait_until(lambda: not store.inspect("k").token, "the end of what the key was kept for")

        (wake,) = swept(store)

        assert wake.run == "other"

    def test_a_look_at_a_held_key_with_waiters(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")
        park(store, "k", "b")

        state = store.inspect("k")

        assert (state.owner, state.token, state.run, state.waiting) == ("a", token, "run", 1)
        assert abs(state.since - time.time()) < 60
        assert 0 < state.remaining <= 30.0

    def test_looking_changes_nothing(self, store: Store) -> None:
        join_before_the_end(store, self.shortest_lease, lambda: park(store, "k", "run"))
        expire(store, "k")

        assert store.inspect("k") == store.inspect("k")
        assert store.inspect("k").waiting == 1

    def test_a_run_parked_by_one_process_is_woken_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a")
        park(another, "k", "run", b"envelope")

        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "run", b"envelope"
        )
        take(another, "k", "b", run="run")

    def test_of_all_processes_one_gets_to_sweep(
        self, store: QueueStore, another: QueueStore
    ) -> None:
        assert list(another.parking.sweep(60.0)) == []
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run"), owner="dead"
        )
        expire(store, "k", "dead")

        assert list(store.parking.sweep(60.0)) == []
