"""Several keys that are acquired in one step."""

import pytest

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store

from .actions import (
    expire,
    fair,
    holder,
    join_before_the_end,
    park,
    parks,
    take,
    take_all,
    take_all_or_skip,
    wait_for,
    waits,
)
from .given import Given

__all__ = ["SeveralKeys"]


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

    def test_several_keys_are_given_up_one_by_one(self, store: Store) -> None:
        take_all_or_skip(store, "kl", "ab")

        assert store.release(ReleaseRequest("k", "a", run="run")).released
        assert store.release(ReleaseRequest("l", "b", run="run")).released

    def test_tokens_rise_however_a_key_was_taken(self, store: Store) -> None:
        first = take(store, "k", "z")
        store.release(ReleaseRequest("k", "z"))

        second, _ = take_all_or_skip(store, "kl", "ab")

        assert second > first
