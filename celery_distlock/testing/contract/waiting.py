"""Tests of blocked waiters: what wakes them, and how they give up."""

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
    expire,
    grantees,
    holder,
    hostile_keys,
    join_before_the_end,
    take,
    wait_for,
    wait_until,
)
from .given import Given

__all__ = ["Waiting"]


class Waiting(Given):
    """Test what blocked waiters may rely on, except for their order."""

    def test_a_waiter_has_the_key_after_its_release(self, store: Store) -> None:
        take(store, "k", "a")
        waiters = [wait_for(store, "k", f"w{n}") for n in range(3)]

        assert store.release(ReleaseRequest("k", "a")) == (True, None)

        assert len(grantees(store, waiters, hands_over=self.hands_over)) == 1

    def test_locks_over_the_store_let_one_thread_in_at_a_time(self, store: Store) -> None:
        inside, passed = [], []

        def work_under_the_lock() -> None:
            for _ in range(5):
                with Lock("k", store=store) as lease:
                    inside.append(lease.token)
                    time.sleep(0.001)  # a chance for others to take the key
                    passed.append((len(inside), lease.token))
                    inside.remove(lease.token)

        threads = [threading.Thread(target=work_under_the_lock) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert [count for count, _ in passed] == [1] * 15
        assert sorted(token for _, token in passed) == [token for _, token in passed]

    def test_a_release_notifies_the_waiter(self, store: Store) -> None:
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

    def test_what_came_before_the_wait_is_not_missed(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        store.release(ReleaseRequest("k", "a"))

        started = time.monotonic()
        waiter.inbox.wait(2 * PATIENCE)

        assert time.monotonic() - started < PATIENCE

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

    def test_waiting_ends_though_nothing_comes(self, store: Store) -> None:
        store.inbox("k", "a").wait(0.01)

    def test_an_inbox_may_be_closed_twice(self, store: Store) -> None:
        inbox = store.inbox("k", "a")

        inbox.close()
        inbox.close()

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
            "the key to pass the one that does not answer",
        )

        assert holder(store, "k") == "alive"

    def test_a_waiter_that_gives_up_leaves_no_trace(self, store: Store) -> None:
        take(store, "k", "a")
        waiter = wait_for(store, "k", "b")
        waiter.inbox.close()

        released = store.release(ReleaseRequest("k", "b", inbox=waiter.inbox))

        assert not released.released
        assert store.inspect("k").waiting == 0
        assert store.release(ReleaseRequest("k", "a")) == (True, None)
        assert not holder(store, "k")

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

    @hostile_keys
    def test_one_can_wait_for_any_key(self, store: Store, key: str) -> None:
        take(store, key, "a")
        waiter = wait_for(store, key, "b")

        store.release(ReleaseRequest(key, "a"))

        waiter.inbox.wait(PATIENCE)
        take(store, key, "b", queue=waiter.inbox)

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
            "the key to pass the one that is gone",
        )
