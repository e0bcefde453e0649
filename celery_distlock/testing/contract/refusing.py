"""Tests of requests that a store cannot serve."""

from contextlib import suppress

import pytest

from celery_distlock.errors import StoreError
from celery_distlock.rate import Rate
from celery_distlock.stores import AcquireRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import Ability, Want

from .actions import GRANTED, take
from .given import Given

__all__ = ["Refusing"]

WANTS = {
    "shared": (Want(1, 0), Ability.SEVERAL),
    "capacity": (Want(1, 3), Ability.SEVERAL),
    "weight": (Want(2, 3), Ability.QUEUE),
    "rate": (Want(1, 1, (Rate(5),)), Ability.QUEUE),
    "shared with a weight": (Want(2, 0), Ability.QUEUE),
}


class Refusing(Given):
    """Refuse requests that need a missing ability, name the ability, and do not change the key."""

    @pytest.mark.parametrize(("want", "ability"), WANTS.values(), ids=list(WANTS))
    @pytest.mark.parametrize("waits", [False, True])
    def test_what_a_store_cannot_is_refused_by_name(
        self, store: Store, want: Want, ability: Ability, waits: bool
    ) -> None:
        queue = store.inbox("k", "a") if waits else None
        request = AcquireRequest("k", "a", self.shortest_lease, queue=queue, want=want)
        if ability in store.abilities:
            assert store.acquire(request).status is GRANTED
            return

        with pytest.raises(StoreError) as raised:
            store.acquire(request)

        words = str(raised.value)
        assert store.address in words
        assert f"cannot {ability.value}: 'k'" in words
        take(store, "k", "b")

    def test_a_store_that_cannot_recall_says_so(self, store: Store) -> None:
        if Ability.RECALL in store.abilities:
            return
        take(store, "k", "a")

        with pytest.raises(StoreError, match=f"cannot {Ability.RECALL.value}") as raised:
            store.recall("k", "a")

        assert store.address in str(raised.value)

    def test_a_refusal_does_not_touch_the_holder(self, store: Store) -> None:
        take(store, "k", "a", run="run")

        with suppress(StoreError):  # a store may refuse it
            store.acquire(AcquireRequest("k", "a", 10.0, run="run", want=Want(2, 3)))

        assert store.inspect("k").owner == "a"
