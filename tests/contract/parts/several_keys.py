"""Several keys that are acquired in one step."""

from collections.abc import Callable

import pytest

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.parking import ParkingStore
from celery_distlock.stores.values import Release, WokenTask
from celery_distlock.testing.contract.actions import (
    AGAIN,
    expire,
    fair,
    holder,
    join_before_the_end,
    park,
    parks,
    recognises,
    stand,
    swept,
    take,
    take_all,
    take_all_or_skip,
    wait_for,
    wait_until,
    waits,
)
from celery_distlock.testing.contract.given import Given

__all__ = ["SeveralKeys"]


def set_out(store: ParkingStore, keys: str) -> None:
    """Have a run stand at free keys, and put it on its way to them."""
    stand(store, keys)
    assert [store.depart(key, "run", first=key == keys[0]).released for key in reversed(keys)]


class SeveralKeys(Given):
    """Several keys are taken all at once, or none is."""

    def test_free_keys_are_taken_in_one_step(self, store: Store) -> None:
        tokens = take_all_or_skip(store, "klm", "abc")

        for key, owner, token in zip("klm", "abc", tokens, strict=True):
            state = store.inspect(key)
            assert (state.owner, state.token, state.run) == (owner, token, "run")

    @pytest.mark.parametrize("taken", "klm")
    def test_if_one_of_several_is_taken_none_is(self, store: Store, taken: str) -> None:
        take(store, taken, "z")

        assert take_all(store, "klm", "abc") is None
        assert [holder(store, key) for key in "klm"] == ["z" * (key == taken) for key in "klm"]

    @waits
    @fair
    def test_who_wants_several_keys_does_not_overtake_a_waiter(self, store: Store) -> None:
        waiter = join_before_the_end(
            store, self.shortest_lease, lambda: wait_for(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")
        take(store, "k", "first", queue=waiter.inbox)

    @parks
    def test_who_wants_several_keys_does_not_overtake(self, store: Store) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "first"), owner="z"
        )
        expire(store, "k", "z")

        assert take_all(store, "kl", "ab") is None
        assert not holder(store, "l")

    @parks
    def test_keys_that_are_kept_for_a_run_are_taken_in_one_step(self, store: ParkingStore) -> None:
        set_out(store, "kl")
        tokens = [store.inspect(key).token for key in "kl"]

        assert take_all_or_skip(store, "kl", "ab", redelivered=True) == tokens

        assert [holder(store, key) for key in "kl"] == ["a", "b"]
        assert [store.parked(key, "run") for key in "kl"] == [None, None]
        for key, owner in ("ka", "lb"):
            assert store.release(ReleaseRequest(key, owner, run="run")) == Release(True, None)

    @parks
    def test_one_that_is_retained_comes_again_if_it_does_not_end(
        self, store: ParkingStore, pass_time: Callable[[float], None]
    ) -> None:
        set_out(store, "kl")
        take_all_or_skip(store, "kl", "ab", redelivered=True, retain=True)

        assert store.parked("k", "run") is not None
        pass_time(31.0)

        (wake,) = wait_until(lambda: swept(store), "a sweep")
        assert wake == WokenTask("k", "run", b"run", returned=True)

    @parks
    def test_keys_that_are_free_are_not_taken_for_one_that_may_have_run(
        self, store: ParkingStore
    ) -> None:
        stand(store, "k")

        assert take_all(store, "kl", "ab", redelivered=True) is None
        assert [holder(store, key) for key in "kl"] == ["parked:run", ""]

    @parks
    @recognises
    def test_keys_that_are_kept_for_a_run_that_has_ended_are_not_taken(
        self, store: ParkingStore
    ) -> None:
        stand(store, "kl")
        take(store, "m", "c", run="run")
        take(store, "l", "d", run="run")
        store.release(ReleaseRequest("l", "d", run="run", completion=AGAIN, keep_for=("run", 30.0)))

        assert take_all(store, "kl", "ab", redelivered=True) is None
        assert holder(store, "k") == "parked:run"

    def test_several_keys_are_given_up_one_by_one(self, store: Store) -> None:
        take_all_or_skip(store, "kl", "ab")

        assert store.release(ReleaseRequest("k", "a", run="run")).released
        assert store.release(ReleaseRequest("l", "b", run="run")).released

    def test_tokens_rise_however_a_key_was_taken(self, store: Store) -> None:
        first = take(store, "k", "z")
        store.release(ReleaseRequest("k", "z"))

        second, _ = take_all_or_skip(store, "kl", "ab")

        assert second > first
