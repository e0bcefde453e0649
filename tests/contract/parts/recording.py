"""What a store records of what operators do."""

from datetime import datetime

import pytest

from celery_distlock.stores.base import Store
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import Action, RenewOutcome, Want
from celery_distlock.testing.contract.actions import HOSTILE_KEYS, enter, renew, take
from celery_distlock.testing.contract.given import Given

__all__ = ["Recording"]

BY = "ann@ops-1"
MOST = 100  # more actions than any store keeps


def take_from(store: Store, owner: str, reason: str = "stuck", key: str = "k") -> None:
    """Have an operator release *key*, held by *owner*."""
    store.record_action(key, Action("release", BY, reason, owners=(owner,)))
    assert store.release(ReleaseRequest(key, owner)).released


class Recording(Given):
    """The record of what operators do to a key is bounded, and the holder that loses it has it."""

    @pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))
    def test_actions_are_told_the_last_first(self, store: Store, another: Store, key: str) -> None:
        pause = Action("pause", BY, "größer \U0001f512 '", "until it is over")
        store.record_action(key, pause)
        store.record_action(key, Action("resume", "bob@ops-2"))

        last, first = another.actions(key)

        assert last[:4] == ("resume", "bob@ops-2", "", "")
        assert first._replace(at=0.0) == pause
        assert 0 < first.at <= last.at
        assert store.actions(f"{key}2") == []

    def test_only_the_last_actions_are_kept(self, store: Store) -> None:
        for number in range(MOST):
            store.record_action("k", Action("pause", BY, str(number)))

        kept = [int(action.reason) for action in store.actions("k")]

        assert 5 <= len(kept) < MOST
        assert kept == list(reversed(range(MOST)))[: len(kept)]

    @pytest.mark.parametrize("is_taken_again", [False, True])
    def test_a_holder_that_loses_its_key_learns_who_has_taken_it(
        self, store: Store, another: Store, *, is_taken_again: bool
    ) -> None:
        take(store, "k", "a")
        take_from(another, "a")
        if is_taken_again:
            take(another, "k", "b")

        (outcome,) = renew(store, ("k", "a", 30.0))

        assert outcome is (RenewOutcome.HELD if is_taken_again else RenewOutcome.LOST)
        cause = store.why_lost("k", "a")
        words, _, rest = cause.partition(" at ")
        at, _, reason = rest.partition(": ")
        assert (words, reason) == (f"taken by {BY}", "stuck")
        assert datetime.fromisoformat(at).timestamp() > 0

    def test_a_holder_that_keeps_its_part_is_not_told_of_others(self, store: Store) -> None:
        enter(store, "k", "ab", Want(1, 5))
        take_from(store, "a")

        assert renew(store, ("k", "a", 30.0), ("k", "b", 30.0)) == [
            RenewOutcome.LOST,
            RenewOutcome.RENEWED,
        ]
        assert store.why_lost("k", "a")
        assert store.why_lost("k", "b", 5.0) == ""

    def test_why_a_key_was_lost_is_looked_up_where_no_renewal_has_said_it(
        self, store: Store
    ) -> None:
        take(store, "k", "a")
        take_from(store, "a", reason="")

        assert store.why_lost("k", "a") == ""
        assert store.why_lost("k", "a", 5.0).startswith(f"taken by {BY} at ")

    def test_no_release_is_recorded_of_an_owner_that_holds_the_key_no_more(
        self, store: Store
    ) -> None:
        take(store, "k", "b")

        store.record_action("k", Action("release", BY, owners=("a",)))

        assert store.actions("k") == []
