"""Stores that know when time alone admits a request."""

import threading
import time
from collections.abc import Callable
from contextlib import closing

from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import Claim, Settled
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Limit, Want
from celery_distlock.testing.contract.actions import RESTS, enter, leave, runs_of, take, wait_until
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, reserve_or_queue, swept

__all__ = ["Timing"]

LONG = 60.0  # seconds for which one is the ticker


def tick(store: QueueStore, process: str = "t", *, seconds: float = LONG) -> Claim:
    """Be the ticker and claim what is due, without an inbox that is read."""
    with closing(store.timetable.ticker_inbox(process)) as inbox:
        return store.timetable.claim_due(process, inbox, seconds)


def claimed(store: QueueStore) -> Claim | None:
    """Claim what is due; None: nothing is."""
    claim = tick(store)
    return claim if claim.names else None


def settle(store: QueueStore, claim: Claim, again: dict[str, float | None]) -> Claim:
    """Say what has come of a claim."""
    with closing(store.timetable.ticker_inbox("t")) as inbox:
        return store.timetable.claim_due("t", inbox, LONG, Settled(claim.number, again))


def wake(store: QueueStore, claim: Claim) -> tuple[list[str], dict[str, float | None]]:
    """Look at what was claimed; return what that wakes, and what is due again."""
    again: dict[str, float | None] = {}
    return runs_of(list(store.parking.wake_due(claim.names, again))), again


class Timing(Given):
    """What time alone lets in is noted, and one ticker looks at it when it is due."""

    # What is noted

    def test_nothing_is_noted_of_keys_that_do_not_rest(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        take(store, "other", "a", want=Want(1, 2))
        park(store, "other", "run", want=Want(2, 2))
        leave(store, "k", "a")
        leave(store, "other", "a")

        assert store.timetable.dues().many == 0

    def test_for_how_long_there_is_a_ticker_is_known(self, store: QueueStore) -> None:
        assert store.timetable.led_for() == 0.0

        tick(store)
        assert LONG / 2 < store.timetable.led_for() <= LONG

        tick(store, seconds=0.0)
        assert store.timetable.led_for() == 0.0

    def test_a_rest_is_noted_if_there_are_waiters(self, store: QueueStore) -> None:
        take(store, "k", "a")
        take(store, "alone", "a")
        park(store, "k", "run")

        leave(store, "k", "a", keep_for=(RESTS, 30.0))
        leave(store, "alone", "a", keep_for=(RESTS, 30.0))

        assert store.timetable.dues().many == 1
        assert 29 < store.timetable.dues().first <= 30.1

    def test_a_rest_is_noted_by_the_first_parked_run(self, store: QueueStore) -> None:
        take(store, "k", "a")
        leave(store, "k", "a", keep_for=(RESTS, 30.0))

        park(store, "k", "run")

        assert 29 < store.timetable.dues().first <= 30.1

    def test_the_rest_of_a_part_is_noted(self, store: QueueStore) -> None:
        enter(store, "k", "ab", Want(1, 2))
        park(store, "k", "run", want=Want(1, 2))

        leave(store, "k", "a", keep_for=(RESTS, 30.0))

        assert 29 < store.timetable.dues().first <= 30.1

    def test_a_key_that_cools_down_is_noted(self, store: QueueStore) -> None:
        assert isinstance(store, QueueStore)
        take(store, "k", "a")
        store.units.rest("k", "a", 30.0)
        park(store, "k", "run")

        leave(store, "k", "a")

        assert 29 < store.timetable.dues().first <= 30.1

    def test_the_end_of_a_limit_is_noted(self, store: QueueStore) -> None:
        assert isinstance(store, QueueStore)
        store.units.set_limit("k", Limit(0, time.time() + 30.0))

        park(store, "k", "run")

        assert 28 < store.timetable.dues().first <= 31

    def test_a_key_where_a_run_needs_others_too_is_noted(self, store: QueueStore) -> None:
        take(store, "k", "a")
        leave(store, "k", "a", keep_for=(RESTS, 30.0))

        reserve_or_queue(store, "jk")

        assert 29 < store.timetable.dues().first <= 30.1

    # What is due

    def test_a_waiter_is_woken_when_it_is_due(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a", keep_for=(RESTS, 1.5))
        assert not tick(store).names
        pass_time(1.5)

        claim = wait_until(lambda: claimed(store), "the key to be due")
        assert claim is not None

        # The record may end a millisecond later than was foreseen.
        wait_until(lambda: wake(store, claim) == (["run"], {"k": None}), "the run to be woken")
        assert settle(store, claim, {"k": None}).names == ()
        assert store.timetable.dues().many == 0

    def test_what_is_not_open_yet_is_due_again(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a", keep_for=(RESTS, 30.0))
        store.timetable.note_due({"k": 0.0})
        claim = tick(store)

        woken, again = wake(store, claim)

        assert woken == []
        assert 29 < (again["k"] or 0.0) <= 30.1
        settle(store, claim, again)
        assert 29 < store.timetable.dues().first <= 30.1

    def test_the_earlier_of_two_times_counts(self, store: QueueStore) -> None:
        for seconds in (30.0, 10.0, 20.0):
            store.timetable.note_due({"k": seconds})

        assert store.timetable.dues().many == 1
        assert 9 < store.timetable.dues().first <= 10

    def test_what_is_claimed_is_out_of_reach_for_a_while(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        store.timetable.note_due({"k": 0.0})
        assert tick(store).names == ("k",)
        assert tick(store).names == ()

        pass_time(2.0)

        wait_until(lambda: tick(store).names == ("k",), "the claim to lapse")

    def test_what_is_noted_while_it_is_claimed_is_kept(self, store: QueueStore) -> None:
        store.timetable.note_due({"k": 0.0})
        claim = tick(store)
        store.timetable.note_due({"k": 30.0})

        settle(store, claim, {"k": None})

        assert 29 < store.timetable.dues().first <= 30

    def test_a_note_that_was_lost_is_made_again_by_a_sweep(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a", keep_for=(RESTS, 1.5))
        store.timetable.note_due({"k": 0.0})
        settle(store, tick(store), {"k": None})
        assert store.timetable.dues().many == 0

        assert swept(store) == []

        assert store.timetable.dues().many == 1
        pass_time(1.5)
        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]

    # The ticker

    def test_one_is_the_ticker(self, store: QueueStore) -> None:
        store.timetable.note_due({"k": 0.0})
        assert tick(store, "first").leads

        second = tick(store, "second")

        assert not second.leads
        assert second.names == ()
        assert second.pause <= LONG
        assert store.timetable.dues().ticker == "first"

    def test_another_one_follows_a_ticker_that_is_silent(self, store: QueueStore) -> None:
        assert tick(store, "first", seconds=0.2).leads

        wait_until(lambda: tick(store, "second").leads, "another ticker")

        assert not tick(store, "first").leads

    def test_another_one_follows_at_once_after_a_resignation(self, store: QueueStore) -> None:
        assert tick(store, "first").leads

        assert not tick(store, "first", seconds=0.0).leads

        assert store.timetable.dues().ticker == ""
        assert tick(store, "second").leads

    def test_only_the_ticker_can_end_its_time(self, store: QueueStore) -> None:
        assert tick(store, "first").leads

        tick(store, "second", seconds=0.0)

        assert store.timetable.dues().ticker == "first"

    def test_the_ticker_is_called_for_what_is_due_before_all_else(self, store: QueueStore) -> None:
        with closing(store.timetable.ticker_inbox("t")) as inbox:
            assert store.timetable.claim_due("t", inbox, LONG).pause > LONG
            waits = Waits(inbox)
            waits.start()
            store.timetable.note_due({"k": 10.0})
            waits.join(timeout=30.0)
            assert not waits.is_alive()
            assert store.timetable.claim_due("t", inbox, LONG).pause <= 10.0


class Waits(threading.Thread):
    """One waits at an inbox until it is called, or until it is due all the same."""

    def __init__(self, inbox: Inbox) -> None:
        super().__init__(daemon=True)
        self._inbox = inbox

    def run(self) -> None:
        self._inbox.wait(600.0)
