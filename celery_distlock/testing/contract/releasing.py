"""Tests of releasing a key, or keeping it locked for a run that comes later."""

from collections.abc import Callable

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store

from .actions import BUSY, GRANTED, RESTS, ask, expire, holder, leave, take, wait_until
from .given import Given

__all__ = ["Releasing"]


class Releasing(Given):
    """Let only the holder of a key release it."""

    def test_a_released_key_is_free(self, store: Store) -> None:
        take(store, "k", "a")

        released = store.release(ReleaseRequest("k", "a"))

        assert released == (True, None)
        take(store, "k", "b")

    def test_a_non_holder_cannot_release_it(self, store: Store) -> None:
        take(store, "k", "a")

        assert store.release(ReleaseRequest("k", "b")) == (False, None)

        assert holder(store, "k") == "a"

    def test_a_second_release_finds_nothing(self, store: Store) -> None:
        take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert not store.release(ReleaseRequest("k", "a")).released

    def test_a_key_without_a_holder_cannot_be_released(self, store: Store) -> None:
        assert store.release(ReleaseRequest("k", "a")) == (False, None)

    def test_a_late_release_does_not_free_the_next_holders_key(self, store: Store) -> None:
        take(store, "k", "a", self.shortest_lease)
        expire(store, "k")
        take(store, "k", "b")

        assert not store.release(ReleaseRequest("k", "a")).released

        assert holder(store, "k") == "b"

    def test_a_key_can_stay_locked_for_a_run_that_comes_later(self, store: Store) -> None:
        token = take(store, "k", "a", run="run")

        released = store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 30.0)))

        assert released == (True, None)
        assert store.acquire(AcquireRequest("k", "b", 30.0)).status is BUSY
        assert take(store, "k", "c", run="run") == token

    def test_a_key_that_was_kept_without_need_is_free(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", self.shortest_lease)))

        wait_until(lambda: not store.inspect("k").token, "the end of what the key was kept for")
        take(store, "k", "b")

    def test_a_non_holder_cannot_keep_it(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        assert not store.release(
            ReleaseRequest("k", "b", run="other", keep_for=("other", 30.0))
        ).released

        assert holder(store, "k") == "a"

    def test_a_resting_key_belongs_to_no_owner(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        assert leave(store, "k", "a", run="run", keep_for=(RESTS, 30.0)) == []

        assert ask(store, "k", "b").status is BUSY
        assert store.inspect("k").owner == f"parked:{RESTS}"
        assert not store.release(ReleaseRequest("k", "a")).released

    def test_what_has_rested_is_free(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 30.0)
        leave(store, "k", "a", keep_for=(RESTS, 1.0))
        pass_time(1.0)

        wait_until(lambda: ask(store, "k", "b").status is GRANTED, "the end of the rest")

    def test_nothing_to_dispatch_is_no_error(self, store: Store) -> None:
        store.dispatch(None)
