"""Several keys that are acquired in one step."""

from collections.abc import Callable

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Release, WokenTask
from celery_distlock.testing.contract.actions import (
    AGAIN,
    expire,
    holder,
    join_before_the_end,
    take,
    take_all,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import RESERVED, park, reserve_or_queue, swept, take_together

__all__ = ["SeveralKeys"]


def set_out(store: QueueStore, keys: str) -> None:
    """Dispatch a run for free keys."""
    assert reserve_or_queue(store, keys).status is RESERVED


class SeveralKeys(Given):
    """Several keys are taken all at once, or none is."""

    def test_free_keys_are_taken_in_one_step(self, store: Store) -> None:
        tokens = take_together(store, "klm", "abc")

        for key, owner, token in zip("klm", "abc", tokens, strict=True):
            state = store.inspect(key)
            assert (state.owner, state.token, state.run) == (owner, token, "run")

    def test_a_request_for_several_keys_does_not_overtake(self, store: Store) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")

    def test_keys_that_are_kept_for_a_run_are_taken_in_one_step(self, store: QueueStore) -> None:
        set_out(store, "kl")
        tokens = [store.inspect(key).token for key in "kl"]

        assert take_together(store, "kl", "ab", redelivered=True) == tokens

        assert [holder(store, key) for key in "kl"] == ["a", "b"]
        assert [store.parking.parked(key, "run") for key in "kl"] == [None, None]
        for key, owner in ("ka", "lb"):
            assert store.release(ReleaseRequest(key, owner, run="run")) == Release(True, None)

    def test_one_that_is_retained_comes_again_if_it_does_not_end(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        set_out(store, "kl")
        take_together(store, "kl", "ab", redelivered=True, retain=True)

        assert store.parking.parked("k", "run") is not None
        pass_time(31.0)

        (wake,) = wait_until(lambda: swept(store), "a sweep")
        assert wake == WokenTask("k", "run", b"run", returned=True)

    def test_keys_that_are_free_are_not_taken_for_one_that_may_have_run(
        self, store: QueueStore
    ) -> None:
        reserve_or_queue(store, "k")

        assert take_all(store, "kl", "ab", redelivered=True) is None
        assert [holder(store, key) for key in "kl"] == ["parked:run", ""]

    def test_keys_that_are_kept_for_a_run_that_has_ended_are_not_taken(
        self, store: QueueStore
    ) -> None:
        reserve_or_queue(store, "kl")
        take(store, "m", "c", run="run")
        take(store, "l", "d", run="run")
        store.release(ReleaseRequest("l", "d", run="run", completion=AGAIN, keep_for=("run", 30.0)))

        assert take_all(store, "kl", "ab", redelivered=True) is None
        assert holder(store, "k") == "parked:run"

    def test_several_keys_are_given_up_one_by_one(self, store: Store) -> None:
        take_together(store, "kl", "ab")

        assert store.release(ReleaseRequest("k", "a", run="run")).released
        assert store.release(ReleaseRequest("l", "b", run="run")).released

    def test_tokens_rise_however_a_key_was_taken(self, store: Store) -> None:
        first = take(store, "k", "z")
        store.release(ReleaseRequest("k", "z"))

        second, _ = take_together(store, "kl", "ab")

        assert second > first
