"""Stores in which a newer call asks an earlier one to leave."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.requests import Identity, ReleaseRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    RenewOutcome,
    Status,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    DONE,
    YES,
    ask,
    enter,
    expire,
    leave,
    renew,
    runs_of,
    take,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park
from tests.contract.parts.sending import send

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

__all__ = ["Recalls"]

RENEWED, RECALLED = RenewOutcome.RENEWED, RenewOutcome.RECALLED
SAME = Identity("same", recalls="free")
FIXED = SAME._replace(fixed=True)
TWO = Want(1, 2)


def outcome(store: QueueStore, owner: str = "a") -> RenewOutcome:
    """Renew the hold of *owner*."""
    (found,) = renew(store, ("k", owner, 30.0))
    return found


def run_first(store: QueueStore, identity: Identity = SAME, want: Want = ALONE) -> None:
    """Have a first call run as owner ``a``."""
    assert send(store, "k", "first:0:0:0", identity=identity, want=want).sent is Sent.GO
    take(store, "k", "a", run="first:0:0:0", redelivered=True, want=want)


def again(store: QueueStore, owner: str = "b") -> Status:
    """Deliver the first call a second time."""
    return ask(store, "k", owner, run="first:0:0:0", redelivered=True).status


class Recalls(Given):
    """A newer call asks the earlier one of its identity to leave, and no other."""

    @pytest.mark.parametrize("want", [ALONE, TWO], ids=["exclusive", "shared"])
    def test_a_newer_call_asks_the_one_that_runs_to_leave(
        self, store: QueueStore, want: Want
    ) -> None:
        run_first(store, want=want)
        assert outcome(store) is RENEWED

        send(store, "k", "second:0:0:0", identity=SAME, want=want)

        assert outcome(store) is RECALLED
        assert outcome(store) is RECALLED

    @pytest.mark.parametrize("want", [ALONE, TWO], ids=["exclusive", "shared"])
    def test_a_look_shows_that_a_newer_call_asked_it(self, store: QueueStore, want: Want) -> None:
        run_first(store, want=want)
        send(store, "k", "second:0:0:0", identity=SAME, want=want)
        store.recall("k", "a")

        (asked,) = [hold.asked for hold in store.inspect("k").holds if hold.who.owner == "a"]

        assert asked.by == "a newer call"
        assert abs(asked.at - time.time()) < 60

    def test_a_sweep_forgets_none_that_runs(self, store: QueueStore) -> None:
        run_first(store)

        list(store.parking.wake_next("k"))
        send(store, "k", "second:0:0:0", identity=SAME)

        assert outcome(store) is RECALLED

    def test_the_newest_waits_until_it_has_left(self, store: QueueStore) -> None:
        run_first(store)
        assert send(store, "k", "second:0:0:0", identity=SAME).sent is Sent.QUEUED

        assert ask(store, "k", "b").status is Status.BUSY

        assert runs_of(leave(store, "k", "a", run="first:0:0:0", completion=YES)) == [
            "second:0:0:0"
        ]
        take(store, "k", "b", run="second:0:0:0", redelivered=True)
        assert outcome(store, "b") is RENEWED

    def test_one_that_is_in_flight_is_asked_when_it_begins(self, store: QueueStore) -> None:
        send(store, "k", "first:0:0:0", identity=SAME)
        newer = SAME._replace(replaces="first:0:0:0")
        assert send(store, "k", "second:0:0:0", identity=newer).sent is Sent.QUEUED

        take(store, "k", "a", run="first:0:0:0", redelivered=True)

        assert outcome(store) is RECALLED

    def test_one_that_waits_and_is_not_replaced_is_asked_when_it_begins(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "other")
        send(store, "k", "first:0:0:0", identity=SAME)
        newer = SAME._replace(replaces="first:0:0:0", beside=True)
        send(store, "k", "second:0:0:0", identity=newer)
        leave(store, "k", "other")

        take(store, "k", "a", run="first:0:0:0", redelivered=True)

        assert outcome(store) is RECALLED

    @pytest.mark.parametrize(
        "newer",
        [Identity("same"), Identity("other", recalls="all"), None],
        ids=["one that does not recall", "another identity", "none"],
    )
    def test_no_other_call_asks_it(self, store: QueueStore, newer: Identity | None) -> None:
        run_first(store)

        send(store, "k", "second:0:0:0", identity=newer)

        assert outcome(store) is RENEWED

    def test_a_holder_without_the_identity_is_not_asked(self, store: QueueStore) -> None:
        for run in ("", "first:0:0:0"):
            take(store, "k", "a", run=run)

            send(store, "k", f"second {run}:0:0:0", identity=SAME)

            assert outcome(store) is RENEWED
            leave(store, "k", "a", run=run, completion=YES)
            store.parking.cancel("k", f"second {run}:0:0:0")

    def test_its_own_retry_does_not_ask_it(self, store: QueueStore) -> None:
        run_first(store)

        send(store, "k", "first:1:0:0", identity=SAME, delay=30.0)

        assert outcome(store) is RENEWED

    @pytest.mark.parametrize(("recalls", "expected"), [("free", RENEWED), ("all", RECALLED)])
    def test_a_fixed_one_is_asked_only_by_a_call_that_asks_all(
        self, store: QueueStore, recalls: str, expected: RenewOutcome
    ) -> None:
        run_first(store, FIXED)

        send(store, "k", "second:0:0:0", identity=SAME._replace(recalls=recalls))

        assert outcome(store) is expected

    def test_a_repeated_call_asks_once_and_for_the_same(self, store: QueueStore) -> None:
        run_first(store)

        for _ in range(2):
            send(store, "k", "second:0:0:0", identity=SAME)

        assert outcome(store) is RECALLED
        leave(store, "k", "a", run="first:0:0:0", completion=YES)
        take(store, "k", "b", run="second:0:0:0", redelivered=True)
        assert outcome(store, "b") is RENEWED

    def test_a_holder_that_upgrades_and_downgrades_is_still_asked(self, store: QueueStore) -> None:
        take(store, "k", "a", want=TWO)
        assert store.recall("k", "a")

        store.units.upgrade("k", "a", 30.0)
        assert outcome(store) is RECALLED
        store.units.downgrade("k", "a", 30.0)

        assert outcome(store) is RECALLED

    def test_of_those_that_share_a_key_one_is_asked(self, store: QueueStore) -> None:
        enter(store, "k", "abc")

        assert store.recall("k", "b")

        assert [outcome(store, owner) for owner in "abc"] == [RENEWED, RECALLED, RENEWED]
        asked = {hold.who.owner: hold.asked.by for hold in store.inspect("k").holds}
        assert asked == {"a": "", "b": "an operator", "c": ""}

    def test_a_key_that_is_kept_for_a_retry_does_not_ask_that(self, store: QueueStore) -> None:
        run_first(store)
        send(store, "k", "second:0:0:0", identity=SAME)

        kept = ("first:1:0:0", 30.0)
        leave(store, "k", "a", run="first:0:0:0", completion=YES, keep_for=kept)
        take(store, "k", "b", run="first:1:0:0")

        assert outcome(store, "b") is RENEWED

    def test_a_retry_for_which_the_key_is_kept_is_asked_when_it_begins(
        self, store: QueueStore
    ) -> None:
        run_first(store)
        kept = ("first:1:0:0", 30.0)
        leave(store, "k", "a", run="first:0:0:0", completion=YES, keep_for=kept)
        send(store, "k", "second:0:0:0", identity=SAME)

        take(store, "k", "b", run="first:1:0:0")

        assert outcome(store, "b") is RECALLED

    # Second deliveries

    @pytest.mark.parametrize("retain", [False, True])
    def test_one_that_is_killed_does_not_begin_again(self, store: QueueStore, retain: bool) -> None:
        send(store, "k", "first:0:0:0", identity=SAME)
        take(store, "k", "a", run="first:0:0:0", redelivered=True, retain=retain)
        send(store, "k", "second:0:0:0", identity=SAME)

        assert runs_of(leave(store, "k", "a", run="first:0:0:0")) == ["second:0:0:0"]

        assert again(store) is Status.RECALLED
        store.drop(WokenTask(slot_name("k"), "first:0:0:0", b""))
        assert again(store) is DONE
        take(store, "k", "c", run="second:0:0:0", redelivered=True)

    def test_one_that_was_in_flight_does_not_begin_again(self, store: QueueStore) -> None:
        send(store, "k", "first:0:0:0", identity=SAME)
        send(store, "k", "second:0:0:0", identity=SAME._replace(replaces="first:0:0:0"))
        take(store, "k", "a", run="first:0:0:0", redelivered=True)
        leave(store, "k", "a", run="first:0:0:0")

        assert again(store) is Status.RECALLED

    @pytest.mark.parametrize("parked", ["before", "after"])
    def test_one_that_is_killed_and_parked_again_does_not_begin_again(
        self, store: QueueStore, pass_time: Callable[[float], None], parked: str
    ) -> None:
        send(store, "k", "first:0:0:0", identity=SAME)
        take(store, "k", "a", 5.0, run="first:0:0:0", redelivered=True)
        if parked == "before":
            park(store, "k", "first:0:0:0", redelivered=True)
        send(store, "k", "second:0:0:0", identity=SAME)
        if parked == "after":
            park(store, "k", "first:0:0:0", redelivered=True)
        pass_time(6.0)
        expire(store, "k")

        list(store.parking.wake_next("k"))
        assert again(store) is Status.RECALLED
        store.drop(WokenTask(slot_name("k"), "first:0:0:0", b""))

        list(store.parking.wake_next("k"))
        take(store, "k", "c", run="second:0:0:0", redelivered=True)
        assert leave(store, "k", "c", run="second:0:0:0", completion=YES) == []

    def test_one_that_waits_again_longer_than_ends_are_remembered_does_not_begin_again(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        run_first(store)
        send(store, "k", "second:0:0:0", identity=SAME)
        park(store, "k", "first:0:0:0", redelivered=True)
        pass_time(2 * 3600.0)
        expire(store, "k")
        list(store.parking.wake_next("k"))
        take(store, "k", "b", run="second:0:0:0", redelivered=True)

        woken = leave(store, "k", "b", run="second:0:0:0", completion=YES)

        assert runs_of(woken) == ["first:0:0:0"]
        assert again(store, "c") is Status.RECALLED

    def test_a_second_delivery_waits_while_the_first_has_the_key(self, store: QueueStore) -> None:
        run_first(store)
        send(store, "k", "second:0:0:0", identity=SAME)

        assert again(store) is Status.BUSY
        park(store, "k", "first:0:0:0", redelivered=True)

        woken = leave(store, "k", "a", run="first:0:0:0", completion=YES)
        assert runs_of(woken) == ["second:0:0:0"]
        assert again(store) is DONE

    @pytest.mark.parametrize("ended", [YES, AGAIN, Completion.UNSETTLED])
    def test_one_that_has_ended_has_ended(self, store: QueueStore, ended: Completion) -> None:
        run_first(store)
        send(store, "k", "second:0:0:0", identity=SAME)

        store.release(ReleaseRequest("k", "a", run="first:0:0:0", completion=ended))
        store.drop(WokenTask(slot_name("k"), "first:0:0:0", b""))

        assert again(store) is DONE

    def test_one_that_an_operator_recalls_begins_again(self, store: QueueStore) -> None:
        take(store, "k", "a", run="first:0:0:0")
        store.recall("k", "a")
        store.release(ReleaseRequest("k", "a", run="first:0:0:0"))

        take(store, "k", "b", run="first:0:0:0", redelivered=True)

        assert outcome(store, "b") is RENEWED

    def test_a_run_that_is_sent_again_begins_again_as_a_new_one(self, store: QueueStore) -> None:
        run_first(store)
        send(store, "k", "second:0:0:0", identity=SAME)
        leave(store, "k", "a", run="first:0:0:0")
        take(store, "k", "b", run="second:0:0:0", redelivered=True)
        leave(store, "k", "b", run="second:0:0:0", completion=YES)

        send(store, "k", "first:0:0:0", identity=SAME)

        take(store, "k", "c", run="first:0:0:0", redelivered=True)
        assert outcome(store, "c") is RENEWED
        leave(store, "k", "c", run="first:0:0:0")
        take(store, "k", "d", run="first:0:0:0", redelivered=True)
