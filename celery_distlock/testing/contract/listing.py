"""Tests of listing keys and waiters, and of counters."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.listing import CountingStore, ListingStore
from celery_distlock.stores.values import Ability

from .actions import found_keys, hostile_keys, take, wait_for
from .given import Given

__all__ = ["CountContract", "ListContract"]


class ListContract(Given):
    """Test that a store lists its keys and their waiters: ability ``LIST``."""

    ability = Ability.LIST

    @hostile_keys
    def test_a_held_key_is_found(self, store: ListingStore, key: str) -> None:
        take(store, key, "a")

        assert [slot_name(found) for found in found_keys(store)] == [slot_name(key)]

    def test_keys_are_found_by_a_pattern(self, store: ListingStore) -> None:
        for key in ("stock:1", "stock:2", "order:1", "stock"):
            take(store, key, "a")

        assert sorted(found_keys(store, "stock:*")) == ["stock:1", "stock:2"]
        assert sorted(found_keys(store, "*:1")) == ["order:1", "stock:1"]
        assert found_keys(store, "stock") == ["stock"]
        assert sorted(found_keys(store, "st[o]ck:[!2]")) == ["stock:1"]
        assert found_keys(store, "Stock*") == []

    @hostile_keys
    def test_a_long_key_s_name_does_for_the_key(self, store: ListingStore, key: str) -> None:
        token = take(store, key, "a")
        (found,) = found_keys(store)

        assert store.inspect(found).token == token
        assert store.release(ReleaseRequest(found, "a")).released
        assert store.inspect(key).token == 0

    def test_a_key_that_is_free_is_not_found(self, store: ListingStore) -> None:
        take(store, "k", "a")
        store.release(ReleaseRequest("k", "a"))

        assert found_keys(store) == []

    def test_many_keys_are_found_once_each(self, store: ListingStore) -> None:
        names = [f"k{number}" for number in range(1500)]
        lease = min(300.0, self.longest_lease)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda name: take(store, name, "a", lease), names))

        assert sorted(found_keys(store)) == sorted(names)

    def test_several_keys_are_looked_at_as_one_by_one(self, store: Store) -> None:
        for number in range(250):
            take(store, f"k{number}", f"o{number}")
        keys = [f"k{number}" for number in range(260)]

        states = store.inspect_many(keys)

        assert [state.owner for state in states] == [f"o{n}" if n < 250 else "" for n in range(260)]
        assert [state.token for state in states] == [store.inspect(key).token for key in keys]

    def test_a_waiter_that_blocks_is_listed_or_not_known(self, store: ListingStore) -> None:
        take(store, "k", "a")
        waiters = [wait_for(store, "k", name) for name in ("b", "c")]
        state = store.inspect("k")

        listed = store.waiters("k")

        assert [waiter.owner for waiter in listed] == ["b", "c"][: state.waiting]
        assert [waiter.owner for waiter in store.waiters("k", first=1, limit=1)] == (
            ["c"] if state.waiting else []
        )
        assert store.waiters("k", first=2) == []
        assert state.oldest == (pytest.approx(listed[0].since, abs=0.01) if listed else 0.0)
        assert not any(waiter.run or waiter.woken for waiter in listed)
        for waiter in waiters:
            waiter.inbox.close()

    def test_a_key_that_was_never_taken_has_no_waiters(self, store: ListingStore) -> None:
        assert store.waiters("k") == []


class CountContract(Given):
    """Test that a store adds up counters: ability ``COUNT``."""

    ability = Ability.COUNT

    def test_what_is_counted_adds_up(self, store: CountingStore) -> None:
        assert store.counts() == {}

        store.count({"a|b c": 1.0, "ü": 0.25})
        store.count({"a|b c": 2.0})

        assert store.counts() == {"a|b c": 3.0, "ü": 0.25}
