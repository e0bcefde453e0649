"""Shared keys: any number of holders, a limited number, or each with a weight."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.rate import Rate
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    ALONE,
    Limit,
    ParkRequest,
    RenewOutcome,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    BUSY,
    DONE,
    GRANTED,
    SHARED,
    THREE,
    TWO,
    YES,
    ask,
    enter,
    leave,
    renew,
    runs_of,
    take,
    take_all,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import PARKED, RESERVED, goes_on, park, reserve_or_queue, swept

__all__ = ["Queued", "SeveralFound", "Units"]


RATED = Want(1, 0, (Rate(1, 60.0),))


def _pass_over(store: QueueStore) -> None:
    enter(store, "k", "a", TWO)
    park(store, "k", "run", want=Want(2, 2))


def _limit_others(store: QueueStore) -> None:
    store.units.set_limit("k", Limit(1))
    enter(store, "k", "a")


def _rest(store: QueueStore) -> None:
    take(store, "k", "a")
    store.units.rest("k", "a", 20.0)
    leave(store, "k", "a")


def _start(store: QueueStore) -> None:
    take(store, "k", "a", want=RATED)
    leave(store, "k", "a")


def _wake(store: QueueStore) -> None:
    take(store, "k", "a")
    park(store, "k", "run", want=TWO)
    leave(store, "k", "a")


SITUATIONS = [
    pytest.param(lambda store: None, id="free"),
    pytest.param(lambda store: take(store, "k", "a"), id="exclusive"),
    pytest.param(lambda store: enter(store, "k", "ab"), id="shared"),
    pytest.param(lambda store: enter(store, "k", "a", TWO), id="one of two"),
    pytest.param(lambda store: enter(store, "k", "a", Want(3, 5)), id="three of five"),
    pytest.param(_pass_over, id="a waiter"),
    pytest.param(lambda store: store.units.set_limit("k", Limit(0)), id="paused"),
    pytest.param(_limit_others, id="as many as a limit allows"),
    pytest.param(_rest, id="at rest"),
    pytest.param(_start, id="as often as a rate allows"),
    pytest.param(_wake, id="reserved"),
]


class Units(Given):
    """What several may have of a key, and when."""

    def test_several_keys_are_taken_each_as_it_is_wanted_or_none_is(self, store: Store) -> None:
        enter(store, "k", "a", TWO)
        wants = (TWO, THREE)
        replies = store.acquire_all(["k", "l"], ["b", "b"], 30.0, run="run", wants=wants)

        assert replies is not None
        assert [(reply.status, reply.slot) for reply in replies] == [(GRANTED, 1), (GRANTED, 0)]
        others = ["m", "k"], ["c", "c"], 30.0
        assert store.acquire_all(*others, run="other", wants=(THREE, TWO)) is None
        assert store.acquire_all(["m", "l"], ["c", "c"], 30.0, run="other") is None
        take(store, "m", "alone")

    @pytest.mark.parametrize("want", [ALONE, SHARED, TWO, Want(2, 3), RATED])
    @pytest.mark.parametrize("prepare", SITUATIONS)
    def test_a_look_shows_whether_what_is_wanted_would_be_granted(
        self, store: QueueStore, prepare: Callable[[QueueStore], object], want: Want
    ) -> None:
        prepare(store)

        _, admits = store.inspect_for("k", want)

        assert admits is (ask(store, "k", "z", want=want).status is GRANTED)

    # Weights

    def test_units_in_use_are_never_more_than_the_capacity(self, store: Store) -> None:
        take(store, "k", "a", want=Want(3, 5))

        assert ask(store, "k", "b", want=Want(3, 5)).status is BUSY
        take(store, "k", "c", want=Want(2, 5))
        assert ask(store, "k", "d", want=Want(1, 5)).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "b", want=Want(3, 5))
        assert store.inspect("k").used == 5

    def test_a_weight_above_the_capacity_counts_as_all_of_it(self, store: Store) -> None:
        take(store, "k", "a", want=Want(9, 4))

        assert store.inspect("k").used == 4
        assert ask(store, "k", "b", want=Want(1, 4)).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "b", want=Want(1, 4))
        assert ask(store, "k", "a", want=Want(9, 4)).status is BUSY

    def test_a_holder_of_more_than_one_unit_has_no_slot(self, store: Store) -> None:
        assert ask(store, "k", "a", want=Want(2, 5)).slot == -1
        assert ask(store, "k", "b", want=Want(1, 5)).slot == 0

    def test_units_of_one_whose_lease_has_ended_are_free(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "heavy", 1.0, want=Want(3, 4))
        take(store, "k", "light", 30.0, want=Want(1, 4))
        pass_time(1.5)

        take(store, "k", "next", want=Want(3, 4))
        assert store.inspect("k").used == 4
        assert ask(store, "k", "one more", want=Want(1, 4)).status is BUSY


class Queued(Given):
    """Waiters for a part of a key: one queue, strictly in order."""

    def test_one_release_wakes_all_that_fit_in_their_order(self, store: QueueStore) -> None:
        take(store, "k", "a")
        for number in range(4):
            park(store, "k", f"run{number}", want=THREE)

        wakes = leave(store, "k", "a")

        assert wakes == [WokenTask(slot_name("k"), f"run{n}", b"run%d" % n) for n in range(3)]
        state = store.inspect("k")
        assert (state.waiting, state.woken) == (1, 3)
        assert {each.owner for each in state.holders} == {f"parked:run{n}" for n in range(3)}
        assert {each.task for each in state.holders} == {"shop.reserve"}
        tokens = {take(store, "k", w.run, run=w.run, redelivered=True, want=THREE) for w in wakes}
        assert len(tokens) == 1

    def test_a_release_wakes_no_waiter_beyond_the_first_that_does_not_fit(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "reader", want=SHARED)
        park(store, "k", "writer")
        park(store, "k", "late", want=SHARED)

        assert runs_of(leave(store, "k", "a")) == ["reader"]
        take(store, "k", "b", run="reader", redelivered=True, want=SHARED)
        assert runs_of(leave(store, "k", "b", run="reader", completion=YES)) == ["writer"]
        take(store, "k", "c", run="writer", redelivered=True)
        assert runs_of(leave(store, "k", "c", run="writer", completion=YES)) == ["late"]

    def test_all_woken_runs_are_dispatched(self, store: QueueStore) -> None:
        sent: list[WokenTask] = []
        store.publishers.known = (sent.append,)
        take(store, "k", "a")
        for run in ("run1", "run2"):
            park(store, "k", run, want=SHARED)

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: len(sent) == 2, "both to be sent")
        assert runs_of(sent) == ["run1", "run2"]

    def test_an_unclaimed_reservation_goes_to_the_next(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        enter(store, "k", "ab", TWO, lease=min(600.0, self.longest_lease))
        park(store, "k", "gone", want=TWO)
        park(store, "k", "next", want=TWO)
        (wake,) = leave(store, "k", "a")
        store.parking.mark_published(wake)
        pass_time(11.0)

        found = wait_until(lambda: swept(store), "a sweep")

        assert runs_of(found) == ["next"]
        assert renew(store, ("k", "b", min(600.0, self.longest_lease))) == [RenewOutcome.RENEWED]

    def test_a_woken_run_that_wants_something_else_now_is_checked_again(
        self, store: QueueStore
    ) -> None:
        enter(store, "k", "ab", TWO)
        park(store, "k", "run", want=TWO)
        leave(store, "k", "a")

        park(store, "k", "run", redelivered=True)  # alone

        assert [waiter.run for waiter in store.waiters("k")] == ["run"]
        assert runs_of(leave(store, "k", "b")) == ["run"]
        take(store, "k", "d", run="run", redelivered=True)

    def test_a_woken_run_that_shares_now_what_is_reserved_exclusively_is_checked_again(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a")

        take(store, "k", "b", run="run", want=TWO, redelivered=True)

        take(store, "k", "c", want=TWO)

    def test_one_that_is_parked_on_arrival_waits_for_what_it_wants(self, store: QueueStore) -> None:
        enter(store, "k", "ab", TWO)
        reply = store.parking.park_if_held("k", "run", ParkRequest(b"run"), 10.0, want=TWO)
        assert reply.status is PARKED

        (waiter,) = store.waiters("k")

        assert (waiter.run, waiter.want) == ("run", TWO)
        assert not reply.is_open
        assert runs_of(leave(store, "k", "a")) == ["run"]

    def test_one_that_is_parked_on_arrival_learns_that_there_is_room(
        self, store: QueueStore
    ) -> None:
        enter(store, "k", "a", TWO)

        reply = store.parking.park_if_held("k", "run", ParkRequest(b"run"), 10.0, want=TWO)

        assert reply.is_open
        assert runs_of(store.parking.wake_next("k")) == ["run"]

    def test_how_much_one_waits_for_is_listed(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "shares", want=SHARED)
        park(store, "k", "alone")
        blocked = wait_for(store, "k", "b", want=TWO)

        wants = [waiter.want for waiter in store.waiters("k")]

        assert wants == [SHARED, Want(), TWO]
        blocked.inbox.close()

    # Second deliveries

    def test_a_parked_second_delivery_blocks_no_other(self, store: Store) -> None:
        take(store, "k", "a", run="run", want=SHARED)

        park(store, "k", "run", redelivered=True, want=SHARED)

        assert store.inspect("k").waiting == 0
        take(store, "k", "b", run="another", want=SHARED)

    def test_a_parked_second_delivery_is_dropped_when_the_first_ends(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", run="run", want=SHARED)
        enter(store, "k", "b", lease=min(600.0, self.longest_lease))
        park(store, "k", "run", redelivered=True, want=SHARED)

        assert leave(store, "k", "a", run="run", completion=AGAIN) == []

        pass_time(40.0)
        assert swept(store) == []
        assert ask(store, "k", "c", run="run", redelivered=True, want=SHARED).status is DONE

    def test_a_parked_second_delivery_runs_if_the_first_gives_up(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run", want=SHARED)
        enter(store, "k", "b")
        park(store, "k", "run", redelivered=True, want=SHARED)

        woken = leave(store, "k", "a", run="run")

        woken = woken or wait_until(lambda: swept(store), "a sweep")
        assert runs_of(woken) == ["run"]
        take(store, "k", "c", run="run", redelivered=True, want=SHARED)

    def test_a_parked_second_delivery_runs_when_the_lease_of_the_first_has_ended(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 30.0, run="run", want=SHARED)
        enter(store, "k", "b", lease=min(600.0, self.longest_lease))
        park(store, "k", "run", redelivered=True, want=SHARED)
        assert swept(store) == []
        pass_time(31.0)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]
        take(store, "k", "c", run="run", redelivered=True, want=SHARED)

    # Several keys

    def test_one_that_needs_several_keys_waits_for_each_as_it_wants_it(
        self, store: QueueStore
    ) -> None:
        enter(store, "k", "a", TWO)
        enter(store, "l", "b")

        reply = reserve_or_queue(store, "kl", wants=(TWO, Want()))

        assert (reply.status, reply.at) == (PARKED, "l")
        assert {each.owner for each in store.inspect("k").holders} == {"a"}
        (wake,) = leave(store, "l", "b")
        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]
        take(store, "k", "c", run="run", redelivered=True, want=TWO)
        take(store, "l", "d", run="run", redelivered=True)

    def test_reserved_units_are_taken_though_others_ask_with_a_higher_capacity(
        self, store: QueueStore
    ) -> None:
        wants = TWO, Want()
        assert reserve_or_queue(store, "kl", wants=wants).status is RESERVED
        enter(store, "k", "cde", Want(1, 9))

        assert take_all(store, "kl", "ab", redelivered=True, wants=wants) is not None

    # Weights

    def test_light_ones_wait_behind_a_heavy_one(self, store: QueueStore) -> None:
        take(store, "k", "a", want=Want(3, 4))
        park(store, "k", "heavy", want=Want(4, 4))
        park(store, "k", "light", want=Want(1, 4))

        assert ask(store, "k", "newcomer", want=Want(1, 4)).status is BUSY
        assert runs_of(leave(store, "k", "a")) == ["heavy"]
        take(store, "k", "b", run="heavy", redelivered=True, want=Want(4, 4))
        woken = leave(store, "k", "b", run="heavy", completion=YES)
        assert runs_of(woken) == ["light"]

    def test_what_one_gives_up_is_shared_out_to_as_many_as_fit(self, store: QueueStore) -> None:
        take(store, "k", "a", want=Want(4, 4))
        for run, units in (("two", 2), ("one", 1), ("three", 3)):
            park(store, "k", run, want=Want(units, 4))

        assert runs_of(leave(store, "k", "a")) == ["two", "one"]
        assert store.inspect("k").used == 3

    def test_a_request_takes_the_unclaimed_reservation_of_a_later_one(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", want=Want(4, 4))
        early = ask(store, "k", "early", queue=store.inbox("k", "early"), want=Want(4, 4))
        store.release(ReleaseRequest("k", "early", inbox=store.inbox("k", "early")))
        park(store, "k", "late", want=Want(2, 4))
        wakes = leave(store, "k", "a")
        assert runs_of(wakes) == ["late"]

        take(store, "k", "back", arrival=early.arrival, want=Want(4, 4))

        assert store.inspect("k").waiting == 1  # it has its place back
        assert leave(store, "k", "back") == []  # it is in flight already
        take(store, "k", "b", run="late", redelivered=True, want=Want(2, 4))


class SeveralFound(Given):
    """List keys that several hold."""

    def test_a_key_that_several_hold_is_found_once(self, store: ListingStore) -> None:
        enter(store, "k", "abc")

        assert [key for keys in store.find_keys() for key in keys] == ["k"]
