"""Tests of the order of blocked waiters."""

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store

from .actions import (
    BUSY,
    expire,
    grantees,
    holder,
    join_before_the_end,
    take,
    take_all,
    wait_for,
)
from .given import Given

__all__ = ["OrderContract"]


class OrderContract(Given):
    """Test that blocked waiters are served in order of arrival."""

    def test_waiters_are_served_in_the_order_of_arrival(self, store: Store) -> None:
        take(store, "k", "first")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(5)]

        served: list[str] = []
        for before in ["first", *(waiter.owner for waiter in waiters[:-1])]:
            store.release(ReleaseRequest("k", before))
            served += grantees(store, waiters[len(served) :], hands_over=self.hands_over)

        assert served == [waiter.owner for waiter in waiters]

    def test_the_place_in_the_queue_counts_from_0(self, store: Store) -> None:
        take(store, "k", "a")

        places = []
        for n in range(3):
            inbox = store.inbox("k", f"w{n}")
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)

        assert places == [0, 0, 1, 1, 2, 2]
        assert store.inspect("k").waiting == 3

    def test_a_request_that_does_not_queue_learns_how_many_wait_before_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        wait_for(store, "k", "c")

        assert store.acquire(AcquireRequest("k", "d", 30.0)).place == 2

    def test_a_handed_over_key_is_not_free_to_others(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        assert store.acquire(AcquireRequest("k", "c", 30.0)).status is BUSY

    def test_a_newcomer_does_not_overtake_the_queue(self, store: Store) -> None:
        join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        expire(store, "k")

        reply = store.acquire(AcquireRequest("k", "newcomer", 30.0))

        assert reply.status is BUSY
        assert reply.holder == "b" or not self.hands_over

    def test_the_first_in_the_queue_gets_a_key_that_expired(self, store: Store) -> None:
        first = join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        second = wait_for(store, "k", "c")
        expire(store, "k")

        assert store.acquire(AcquireRequest("k", "c", 30.0, queue=second.inbox)).status is BUSY
        take(store, "k", "b", queue=first.inbox)

    def test_tokens_rise_from_waiter_to_waiter(self, store: Store) -> None:
        tokens = [take(store, "k", "a")]
        waiters = [wait_for(store, "k", f"w{n}") for n in range(3)]
        before = "a"
        for waiter in waiters:
            store.release(ReleaseRequest("k", before))
            before = waiter.owner
            tokens.append(take(store, "k", before, queue=waiter.inbox))

        assert tokens == sorted(set(tokens))

    def test_a_request_for_several_keys_does_not_overtake_a_waiter(self, store: Store) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")
        take(store, "k", "first", queue=waiter.inbox)

    def test_a_queue_is_one_for_all_processes(self, store: Store, another: Store) -> None:
        take(store, "k", "a")
        here, there = wait_for(store, "k", "b"), wait_for(another, "k", "c")
        store.release(ReleaseRequest("k", "a"))

        assert another.acquire(AcquireRequest("k", "c", 30.0, queue=there.inbox)).status is BUSY
        take(store, "k", "b", queue=here.inbox)
        store.release(ReleaseRequest("k", "b"))
        take(another, "k", "c", queue=there.inbox)
