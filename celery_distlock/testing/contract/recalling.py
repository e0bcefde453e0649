"""Tests of holders that are asked to leave."""

import time
from collections.abc import Callable

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.holders import Asked
from celery_distlock.stores.values import Ability, RenewOutcome

from .actions import BUSY, ask, expire, holder, renew, take
from .given import Given

__all__ = ["RecallContract"]

RENEWED, RECALLED = RenewOutcome.RENEWED, RenewOutcome.RECALLED


class RecallContract(Given):
    """Test that a holder is asked to leave, and keeps its key: ability ``RECALL``."""

    ability = Ability.RECALL

    def test_a_renewal_asks_the_holder_to_leave(self, store: Store, another: Store) -> None:
        take(store, "k", "a", 15.0)
        assert renew(store, ("k", "a", 15.0)) == [RENEWED]

        assert another.recall("k", "a")

        assert renew(store, ("k", "a", 30.0)) == [RECALLED]
        assert store.inspect("k").remaining > 15.0

    def test_each_later_renewal_reports_it_again(self, store: Store) -> None:
        take(store, "k", "a")
        assert store.recall("k", "a")
        assert store.recall("k", "a")

        assert renew(store, *[("k", "a", 30.0)] * 2) == [RECALLED] * 2
        assert renew(store, ("k", "a", 30.0)) == [RECALLED]

    def test_a_recall_takes_nothing(self, store: Store) -> None:
        token = take(store, "k", "a")

        store.recall("k", "a")

        assert ask(store, "k", "b").status is BUSY
        assert (holder(store, "k"), store.inspect("k").token) == ("a", token)
        assert store.release(ReleaseRequest("k", "a")).released
        take(store, "k", "b")

    def test_a_look_shows_when_it_was_asked_first_and_by_what(self, store: Store) -> None:
        take(store, "k", "a")
        assert store.inspect("k").asked == Asked()
        store.recall("k", "a")
        asked = store.inspect("k").asked
        renew(store, ("k", "a", 30.0))
        store.recall("k", "a")

        assert (store.inspect("k").asked, asked.by) == (asked, "an operator")
        assert abs(asked.at - time.time()) < 60
        assert [hold.asked for hold in store.inspect("k").holds] == [asked]

    def test_only_its_holder_can_be_asked(self, store: Store) -> None:
        assert not store.recall("k", "a")
        take(store, "k", "b")

        assert not store.recall("k", "a")

        assert renew(store, ("k", "b", 30.0)) == [RENEWED]

    def test_a_recall_ends_with_the_hold(self, store: Store) -> None:
        take(store, "k", "a")
        store.recall("k", "a")
        store.release(ReleaseRequest("k", "a"))
        assert not store.recall("k", "a")

        for owner in ("b", "a"):
            take(store, "k", owner)
            assert renew(store, ("k", owner, 30.0)) == [RENEWED]
            assert store.inspect("k").asked == Asked()
            store.release(ReleaseRequest("k", owner))

    def test_a_hold_whose_lease_is_over_is_not_asked(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 1.0)
        pass_time(1.5)
        expire(store, "k")

        assert not store.recall("k", "a")

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.LOST]
