"""What a store records of what operators do."""

import itertools
from datetime import datetime

import pytest

from celery_distlock.keys import key_of, slot_name
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import Action, RenewOutcome, Want
from celery_distlock.testing.contract.actions import HOSTILE_KEYS, enter, renew, take
from celery_distlock.testing.contract.given import Given

__all__ = ["Recording"]

BY = "ann@ops-1"
MOST = 100  # more actions than any store keeps


def take_from(store: QueueStore, owner: str, reason: str = "stuck", key: str = "k") -> None:
    """Have an operator release *key*, held by *owner*."""
    store.audit.record_action(key, Action("release", BY, reason, owners=(owner,)))
    assert store.release(ReleaseRequest(key, owner)).released


class Recording(Given):
    """The record of what operators do to a key is bounded, and the holder that loses it has it."""

    def test_a_record_changes_nothing_for_the_holder(self, store: QueueStore) -> None:
        take(store, "k", "a")

        assert store.audit.record_action("k", Action("pause", BY, "their import"))

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]

    @pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))
    def test_actions_are_listed_newest_first(
        self, store: QueueStore, another: QueueStore, key: str
    ) -> None:
        pause = Action("pause", BY, "größer \U0001f512 '", "until it is over")
        store.audit.record_action(key, pause)
        store.audit.record_action(key, Action("resume", "bob@ops-2"))

        last, first = another.audit.actions(key)

        assert last[:4] == ("resume", "bob@ops-2", "", "")
        assert first._replace(at=0.0) == pause
        assert 0 < first.at <= last.at
        assert store.audit.actions(f"{key}2") == []
        listed = list(itertools.chain.from_iterable(store.audit.keys_acted_on()))
        assert listed == [key_of(slot_name(key))]

    def test_only_the_last_actions_are_kept(self, store: QueueStore) -> None:
        for number in range(MOST):
            store.audit.record_action("k", Action("pause", BY, str(number)))

        kept = [int(action.reason) for action in store.audit.actions("k")]

        assert 5 <= len(kept) < MOST
        assert kept == list(reversed(range(MOST)))[: len(kept)]

    @pytest.mark.parametrize("is_taken_again", [False, True])
    def test_a_holder_that_loses_its_key_learns_its_new_holder(
        self, store: QueueStore, another: QueueStore, *, is_taken_again: bool
    ) -> None:
        take(store, "k", "a")
        take_from(another, "a")
        if is_taken_again:
            take(another, "k", "b")

        (outcome,) = renew(store, ("k", "a", 30.0))

        assert outcome is (RenewOutcome.HELD if is_taken_again else RenewOutcome.LOST)
        cause = store.audit.why_lost("k", "a")
        words, _, rest = cause.partition(" at ")
        at, _, reason = rest.partition(": ")
        assert (words, reason) == (f"taken by {BY}", "stuck")
        assert datetime.fromisoformat(at).timestamp() > 0

    def test_a_holder_that_keeps_its_part_is_not_notified_of_others(
        self, store: QueueStore
    ) -> None:
        enter(store, "k", "ab", Want(1, 5))
        take_from(store, "a")

        assert renew(store, ("k", "a", 30.0), ("k", "b", 30.0)) == [
            RenewOutcome.LOST,
            RenewOutcome.RENEWED,
        ]
        assert store.audit.why_lost("k", "a")
        assert store.audit.why_lost("k", "b", 5.0) == ""

    def test_why_a_key_was_lost_is_looked_up_where_no_renewal_has_said_it(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        take_from(store, "a", reason="")

        assert store.audit.why_lost("k", "a") == ""
        assert store.audit.why_lost("k", "a", 5.0).startswith(f"taken by {BY} at ")

    def test_no_release_is_recorded_of_an_owner_that_holds_the_key_no_more(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "b")

        store.audit.record_action("k", Action("release", BY, owners=("a",)))

        assert store.audit.actions("k") == []
