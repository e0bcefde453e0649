"""Blocked waiters: their order, and what wakes them."""

import threading
import time
from collections.abc import Callable

from celery_distlock import Lock
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store

from .actions import (
    BUSY,
    GRANTED,
    PATIENCE,
    YES,
    Waiter,
    expire,
    fair,
    holder,
    join_before_the_end,
    park,
    parks,
    take,
    wait_for,
    wait_until,
    waits,
)
from .given import Given

__all__ = ["Waiting"]


class Waiting(Given):
    """A blocked waiter has the key when its turn comes."""

    @waits
    def test_a_waiter_has_the_key_after_its_release(self, store: Store) -> None:
        take(store, "k", "a")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(3)]

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        assert len(self.granted(store, waiters)) == 1

    @waits
    def test_locks_over_the_store_let_one_thread_in_at_a_time(self, store: Store) -> None:
        inside, passed = [], []

        def work_under_the_lock() -> None:
            for _ in range(5):
                with Lock("k", store=store) as lease:
                    inside.append(lease.token)
                    time.sleep(0.001)  # others would come in now
                    passed.append((len(inside), lease.token))
                    inside.remove(lease.token)

        threads = [threading.Thread(target=work_under_the_lock) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [count for count, _ in passed] == [1] * 15
        assert sorted(token for _, token in passed) == [token for _, token in passed]

    @waits
    @fair
    def test_waiters_are_served_in_the_order_of_arrival(self, store: Store) -> None:
        take(store, "k", "first")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(5)]

        served: list[str] = []
        for before in ["first", *(waiter.owner for waiter in waiters[:-1])]:
            store.release(ReleaseRequest("k", before))
            served += self.granted(store, waiters[len(served) :])

        assert served == [waiter.owner for waiter in waiters]

    @waits
    @parks
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
                (current,) = self.granted(store, waiters)
                del waiters[0]
            served.append(current)

        assert served == arrivals

    def granted(self, store: Store, waiters: list[Waiter]) -> list[str]:
        """Return which of the waiters has the key, though the last one asks first."""
        before = holder(store, "k")
        got = [
            waiter.owner
            for waiter in reversed(waiters)
            if store.acquire(AcquireRequest("k", waiter.owner, 30.0, queue=waiter.inbox)).status
            is GRANTED
        ]
        assert got == [before] or not self.hands_over
        return got

    @waits
    @fair
    def test_the_place_in_the_queue_counts_from_0(self, store: Store) -> None:
        take(store, "k", "a")

        places = []
        for n in range(3):
            inbox = store.inbox("k", f"w{n}")
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)
            places.append(store.acquire(AcquireRequest("k", f"w{n}", 30.0, queue=inbox)).place)

        assert places == [0, 0, 1, 1, 2, 2]
        assert store.inspect("k").waiting == 3

    @waits
    @fair
    def test_one_who_does_not_queue_learns_how_many_wait_before_him(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        wait_for(store, "k", "c")

        assert store.acquire(AcquireRequest("k", "d", 30.0)).place == 2

    @waits
    @parks
    def test_one_who_does_not_queue_learns_how_many_are_before_him(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        park(store, "k", "run")

        assert store.acquire(AcquireRequest("k", "c", 30.0)).place == 2

    @waits
    def test_a_release_tells_the_waiter(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        thread = threading.Thread(target=waiter.inbox.wait, args=(2 * PATIENCE,), daemon=True)
        thread.start()

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        assert holder(store, "k") == "b" or not self.hands_over
        thread.join(PATIENCE)
        assert not thread.is_alive(), "nothing came to the waiter's inbox"
        take(store, "k", "b", queue=waiter.inbox)
        assert store.inspect("k").waiting == 0

    @waits
    def test_what_came_before_the_wait_is_not_missed(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        started = time.monotonic()
        waiter.inbox.wait(2 * PATIENCE)

        assert time.monotonic() - started < PATIENCE

    @waits
    def test_a_waiter_that_does_not_block_is_called_or_looks_soon(self, store: Store) -> None:
        take(store, "k", "a")
        called, inbox = threading.Event(), store.inbox("k", "b")
        inbox.on_push(called.set)
        assert store.acquire(AcquireRequest("k", "b", 30.0, queue=inbox)).status is BUSY
        pause = inbox.next_look(2 * PATIENCE)
        assert 0 < pause <= 2 * PATIENCE

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        started = time.monotonic()
        called.wait(pause)
        assert time.monotonic() - started < PATIENCE, "it was not called"
        take(store, "k", "b", queue=inbox)
        inbox.close()

    @waits
    def test_waiting_ends_though_nothing_comes(self, store: Store) -> None:
        store.inbox("k", "a").wait(0.01)

    @waits
    def test_an_inbox_may_be_closed_twice(self, store: Store) -> None:
        inbox = store.inbox("k", "a")

        inbox.close()
        inbox.close()

    @waits
    @fair
    def test_a_handed_over_key_is_not_free_to_others(self, store: Store) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        assert store.acquire(AcquireRequest("k", "c", 30.0)).status is BUSY

    @waits
    def test_a_waiter_that_does_not_confirm_loses_his_turn(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "stopped", 1.0)
        alive = wait_for(store, "k", "alive")
        store.release(ReleaseRequest("k", "a"))
        pass_time(2.0)

        wait_until(
            lambda: (
                store.acquire(AcquireRequest("k", "alive", 30.0, queue=alive.inbox)).status
                is GRANTED
            ),
            "the key to pass the one who does not answer",
        )

        assert holder(store, "k") == "alive"

    @waits
    def test_a_waiter_that_gives_up_leaves_no_trace(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        waiter.inbox.close()

        released = store.release(ReleaseRequest("k", "b", inbox=waiter.inbox))

        assert not released.released
        assert store.inspect("k").waiting == 0
        assert store.release(ReleaseRequest("k", "a")) == (True, None)
        assert not holder(store, "k")

    @waits
    def test_a_waiter_that_gives_up_as_the_key_becomes_free_does_not_keep_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        first, second = wait_for(store, "k", "b"), wait_for(store, "k", "c")
        store.release(ReleaseRequest("k", "a"))

        released = store.release(ReleaseRequest("k", "b", inbox=first.inbox))

        assert released.released or not self.hands_over
        assert released.wake is None
        take(store, "k", "c", queue=second.inbox)

    @waits
    @parks
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

    @waits
    @fair
    def test_a_newcomer_does_not_overtake_the_queue(self, store: Store) -> None:
        join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        expire(store, "k")

        reply = store.acquire(AcquireRequest("k", "newcomer", 30.0))

        assert reply.status is BUSY
        assert reply.holder == "b" or not self.hands_over

    @waits
    @fair
    def test_the_first_in_the_queue_gets_a_key_that_expired(self, store: Store) -> None:
        first = join_before_the_end(store, self.shortest_lease, lambda: wait_for(store, "k", "b"))
        second = wait_for(store, "k", "c")
        expire(store, "k")

        assert store.acquire(AcquireRequest("k", "c", 30.0, queue=second.inbox)).status is BUSY
        take(store, "k", "b", queue=first.inbox)

    @waits
    def test_a_blocked_run_that_finds_the_key_free_leaves_nothing_in_the_queue(
        self, store: Store
    ) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "b", run="run")
        )
        expire(store, "k")
        take(store, "k", "b", queue=waiter.inbox, run="run")

        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert not holder(store, "k")
        assert store.inspect("k").waiting == 0
