"""Keys that several hold: any number, so many, or each with a weight."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.parking import ParkingStore
from celery_distlock.stores.values import (
    MOST_SLOTS,
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
    PARKED,
    RESERVED,
    SHARED,
    YES,
    ask,
    enter,
    fair,
    goes_on,
    leave,
    lists,
    park,
    parks,
    recognises,
    renew,
    runs_of,
    several,
    stand,
    swept,
    take,
    wait_for,
    wait_until,
    waits,
    weighs,
)
from celery_distlock.testing.contract.given import Given

__all__ = ["Queued", "Units"]

TWO, THREE = Want(1, 2), Want(1, 3)


class Units(Given):
    """What several may have of a key, and when."""

    @several
    def test_any_number_share_a_key(self, store: Store) -> None:
        enter(store, "k", "abcdefghijkl")

    @several
    def test_nobody_enters_beside_one_who_is_alone(self, store: Store) -> None:
        take(store, "k", "a")

        for want in (SHARED, TWO):
            reply = ask(store, "k", "b", want=want)
            assert (reply.status, reply.holder) == (BUSY, "a")

    @several
    def test_nobody_is_alone_beside_those_who_share(self, store: Store) -> None:
        enter(store, "k", "ab")

        reply = ask(store, "k", "c")

        assert reply.status is BUSY
        assert reply.holder in {"a", "b"}
        assert 0.0 < reply.remaining <= 30.1

    @several
    def test_so_many_hold_a_key_as_its_capacity_says_and_no_more(self, store: Store) -> None:
        enter(store, "k", "abc", THREE)

        assert ask(store, "k", "d", want=THREE).status is BUSY
        leave(store, "k", "b")
        take(store, "k", "d", want=THREE)
        assert ask(store, "k", "e", want=THREE).status is BUSY

    @several
    def test_each_is_judged_by_its_own_capacity(self, store: Store) -> None:
        enter(store, "k", "ab", TWO)

        assert ask(store, "k", "c", want=TWO).status is BUSY
        take(store, "k", "c", want=THREE)
        take(store, "k", "d", want=SHARED)
        assert ask(store, "k", "e", want=THREE).status is BUSY
        assert (
            renew(store, *((k, o, 30.0) for k, o in zip("kkkk", "abcd", strict=True)))
            == [RenewOutcome.RENEWED] * 4
        )

    @several
    def test_who_asks_again_has_what_it_had(self, store: Store) -> None:
        enter(store, "k", "ab", THREE)

        first, again = (ask(store, "k", "b", want=THREE) for _ in range(2))

        assert first.status is again.status is GRANTED
        assert (first.token, first.slot) == (again.token, again.slot)
        take(store, "k", "c", want=THREE)
        assert ask(store, "k", "d", want=THREE).status is BUSY

    @several
    def test_each_of_so_many_has_a_slot_of_its_own_the_lowest_that_is_free(
        self, store: Store
    ) -> None:
        slots = [ask(store, "k", owner, want=THREE).slot for owner in "abc"]
        leave(store, "k", "b")

        assert slots == [0, 1, 2]
        assert ask(store, "k", "d", want=THREE).slot == 1
        assert ask(store, "k", "a", want=THREE).slot == 0

    @several
    def test_those_whose_units_are_not_counted_one_by_one_have_no_slot(self, store: Store) -> None:
        assert ask(store, "alone", "a").slot == -1
        assert ask(store, "shared", "a", want=SHARED).slot == -1
        assert ask(store, "many", "a", want=Want(1, MOST_SLOTS + 1)).slot == -1
        assert ask(store, "some", "a", want=Want(1, MOST_SLOTS)).slot == 0

    @several
    def test_all_who_share_without_a_gap_have_one_token_and_later_ones_a_greater(
        self, store: Store
    ) -> None:
        before = take(store, "k", "alone")
        leave(store, "k", "alone")
        first = enter(store, "k", "ab")
        leave(store, "k", "a")
        assert take(store, "k", "c", want=THREE) == first
        leave(store, "k", "b")
        leave(store, "k", "c")
        second = enter(store, "k", "de")
        leave(store, "k", "d")
        leave(store, "k", "e")

        assert before < first < second < take(store, "k", "alone again")

    @several
    def test_one_who_leaves_takes_nothing_from_the_others(self, store: Store) -> None:
        enter(store, "k", "ab")

        leave(store, "k", "a")

        assert not store.release(ReleaseRequest("k", "a")).released
        assert not store.release(ReleaseRequest("k", "stranger")).released
        assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
        assert ask(store, "k", "c").status is BUSY
        leave(store, "k", "b")
        take(store, "k", "c")

    @several
    def test_each_lease_ends_by_itself(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "long", 30.0, want=TWO)
        take(store, "k", "short", 1.0, want=TWO)
        pass_time(1.5)

        assert renew(store, ("k", "short", 30.0)) == [RenewOutcome.LOST]
        assert renew(store, ("k", "long", 30.0)) == [RenewOutcome.RENEWED]
        take(store, "k", "next", want=TWO)
        assert ask(store, "k", "one more", want=TWO).status is BUSY
        assert ask(store, "k", "alone").status is BUSY

    @several
    def test_one_who_renews_outlives_the_others(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        enter(store, "k", "ab", lease=2.0)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        pass_time(2.0)

        assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.LOST]
        assert ask(store, "k", "c").status is BUSY
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]

    @several
    def test_what_is_kept_for_a_run_is_what_its_holder_had(self, store: Store) -> None:
        enter(store, "k", "ab", TWO)
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run-again", 30.0)))

        assert ask(store, "k", "c", want=TWO).status is BUSY
        take(store, "k", "d", run="run-again", want=TWO)
        assert ask(store, "k", "c", want=TWO).status is BUSY
        leave(store, "k", "d", run="run-again")
        take(store, "k", "c", want=TWO)

    @several
    def test_several_keys_are_taken_each_as_it_is_wanted_or_none_is(self, store: Store) -> None:
        enter(store, "k", "a", TWO)
        wants = (TWO, THREE)
        replies = store.acquire_all(["k", "l"], ["b", "b"], 30.0, run="run", wants=wants)
        if replies is None:
            pytest.skip("the store takes one key at a time")

        assert [(reply.status, reply.slot) for reply in replies] == [(GRANTED, 1), (GRANTED, 0)]
        others = ["m", "k"], ["c", "c"], 30.0
        assert store.acquire_all(*others, run="other", wants=(THREE, TWO)) is None
        assert store.acquire_all(["m", "l"], ["c", "c"], 30.0, run="other") is None
        take(store, "m", "alone")

    @several
    def test_a_look_tells_who_has_it(self, store: Store) -> None:
        take(store, "k", "a", 20.0, run="run-a", want=THREE)
        take(store, "k", "b", 30.0, want=THREE)

        state = store.inspect("k")

        found = {(each.owner, each.run, each.units, each.slot) for each in state.holders}
        assert found == {("a", "run-a", 1, 0), ("b", "", 1, 1)}
        assert (state.used, state.capacity) == (2, 3)
        assert state.owner in {"a", "b"}
        assert state.token == ask(store, "k", "a", want=THREE).token
        by_owner = {each.owner: each for each in state.holders}
        assert 0.0 < by_owner["a"].remaining <= 20.1 < by_owner["b"].remaining <= 30.1

    @several
    def test_a_look_at_one_who_is_alone_tells_of_no_others(self, store: Store) -> None:
        take(store, "k", "a")

        state = store.inspect("k")

        assert (state.holders, state.capacity, state.owner) == ((), 1, "a")

    @several
    @lists
    def test_a_key_that_several_hold_is_found_once(self, store: ListingStore) -> None:
        enter(store, "k", "abc")

        assert [key for keys in store.find_keys() for key in keys] == ["k"]

    # Weights

    @weighs
    def test_units_in_use_are_never_more_than_the_capacity(self, store: Store) -> None:
        take(store, "k", "a", want=Want(3, 5))

        assert ask(store, "k", "b", want=Want(3, 5)).status is BUSY
        take(store, "k", "c", want=Want(2, 5))
        assert ask(store, "k", "d", want=Want(1, 5)).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "b", want=Want(3, 5))
        assert store.inspect("k").used == 5

    @weighs
    def test_a_weight_above_the_capacity_counts_as_all_of_it(self, store: Store) -> None:
        take(store, "k", "a", want=Want(9, 4))

        assert store.inspect("k").used == 4
        assert ask(store, "k", "b", want=Want(1, 4)).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "b", want=Want(1, 4))
        assert ask(store, "k", "a", want=Want(9, 4)).status is BUSY

    @weighs
    def test_who_has_more_than_one_unit_has_no_slot(self, store: Store) -> None:
        assert ask(store, "k", "a", want=Want(2, 5)).slot == -1
        assert ask(store, "k", "b", want=Want(1, 5)).slot == 0

    @weighs
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
    """Who waits for a part of a key: one queue, strictly in order."""

    @several
    @waits
    @fair
    def test_who_would_fit_waits_behind_one_who_does_not(self, store: Store) -> None:
        enter(store, "k", "a")
        writer = wait_for(store, "k", "writer")

        reader = wait_for(store, "k", "reader", want=SHARED)

        assert ask(store, "k", "newcomer", want=SHARED).status is BUSY
        assert ask(store, "k", "reader", queue=reader.inbox, want=SHARED).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "writer", queue=writer.inbox)
        assert ask(store, "k", "reader", queue=reader.inbox, want=SHARED).status is BUSY
        leave(store, "k", "writer")
        take(store, "k", "reader", queue=reader.inbox, want=SHARED)

    @several
    @waits
    @fair
    def test_all_who_share_enter_together_up_to_the_next_who_does_not(self, store: Store) -> None:
        take(store, "k", "a")
        readers = [wait_for(store, "k", f"r{n}", want=SHARED) for n in range(3)]
        writer = wait_for(store, "k", "writer")
        late = wait_for(store, "k", "late", want=SHARED)
        leave(store, "k", "a")

        tokens = {take(store, "k", each.owner, queue=each.inbox, want=SHARED) for each in readers}

        assert len(tokens) == 1
        assert ask(store, "k", "late", queue=late.inbox, want=SHARED).status is BUSY
        for reader in readers:
            assert ask(store, "k", "writer", queue=writer.inbox).status is BUSY
            leave(store, "k", reader.owner)
        take(store, "k", "writer", queue=writer.inbox)

    @several
    @waits
    @fair
    def test_one_who_gives_up_keeps_those_behind_him_from_nothing(self, store: Store) -> None:
        enter(store, "k", "a")
        writer = wait_for(store, "k", "writer")
        reader = wait_for(store, "k", "reader", want=SHARED)

        store.release(ReleaseRequest("k", "writer", inbox=writer.inbox))

        take(store, "k", "reader", queue=reader.inbox, want=SHARED)

    @several
    @waits
    @fair
    def test_a_unit_that_was_handed_over_is_not_free_to_others(self, store: Store) -> None:
        enter(store, "k", "ab", TWO)
        waiter = wait_for(store, "k", "c", want=TWO)
        leave(store, "k", "a")

        assert ask(store, "k", "newcomer", want=TWO).status is BUSY
        take(store, "k", "c", queue=waiter.inbox, want=TWO)

    @several
    @parks
    def test_one_release_wakes_all_who_fit_in_their_order(self, store: ParkingStore) -> None:
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

    @several
    @parks
    def test_a_release_wakes_nobody_beyond_the_first_who_does_not_fit(
        self, store: ParkingStore
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

    @several
    @parks
    def test_all_who_were_woken_are_dispatched(self, store: ParkingStore) -> None:
        sent: list[WokenTask] = []
        store.publishers = (sent.append,)
        take(store, "k", "a")
        for run in ("run1", "run2"):
            park(store, "k", run, want=SHARED)

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: len(sent) == 2, "both to be sent")
        assert runs_of(sent) == ["run1", "run2"]

    @several
    @parks
    def test_what_nobody_comes_for_goes_to_the_next(
        self, store: ParkingStore, pass_time: Callable[[float], None]
    ) -> None:
        enter(store, "k", "ab", TWO, lease=min(600.0, self.longest_lease))
        park(store, "k", "gone", want=TWO)
        park(store, "k", "next", want=TWO)
        (wake,) = leave(store, "k", "a")
        store.mark_published(wake)
        pass_time(11.0)

        found = wait_until(lambda: swept(store), "a sweep")

        assert runs_of(found) == ["next"]
        assert renew(store, ("k", "b", min(600.0, self.longest_lease))) == [RenewOutcome.RENEWED]

    @several
    @parks
    def test_a_woken_run_that_wants_something_else_now_is_judged_anew(
        self, store: ParkingStore
    ) -> None:
        enter(store, "k", "ab", TWO)
        park(store, "k", "run", want=TWO)
        leave(store, "k", "a")

        park(store, "k", "run", redelivered=True)  # alone

        assert [waiter.run for waiter in store.waiters("k")] == ["run"]
        assert runs_of(leave(store, "k", "b")) == ["run"]
        take(store, "k", "d", run="run", redelivered=True)

    @several
    @parks
    def test_one_who_is_parked_on_arrival_waits_for_what_it_wants(
        self, store: ParkingStore
    ) -> None:
        enter(store, "k", "ab", TWO)
        reply = store.park_if_held("k", "run", ParkRequest(b"run"), 10.0, want=TWO)
        if reply.status is not PARKED:
            pytest.skip("the store parks nobody on arrival")

        (waiter,) = store.waiters("k")

        assert (waiter.run, waiter.want) == ("run", TWO)
        assert runs_of(leave(store, "k", "a")) == ["run"]

    @several
    @parks
    def test_how_much_one_waits_for_is_listed(self, store: ParkingStore) -> None:
        take(store, "k", "a")
        park(store, "k", "shares", want=SHARED)
        park(store, "k", "alone")
        blocked = wait_for(store, "k", "b", want=TWO)

        wants = [waiter.want for waiter in store.waiters("k")]

        assert wants == [SHARED, Want(), TWO]
        blocked.inbox.close()

    # Second deliveries

    @several
    def test_a_second_delivery_is_not_granted_beside_the_first(self, store: Store) -> None:
        take(store, "k", "a", run="run", want=THREE)

        reply = ask(store, "k", "b", run="run", redelivered=True, want=THREE)

        assert (reply.status, reply.holder_run) == (BUSY, "run")
        take(store, "k", "c", run="another", want=THREE)

    @several
    @parks
    def test_a_parked_second_delivery_keeps_nobody_from_entering(self, store: Store) -> None:
        take(store, "k", "a", run="run", want=SHARED)

        park(store, "k", "run", redelivered=True, want=SHARED)

        assert store.inspect("k").waiting == 0
        take(store, "k", "b", run="another", want=SHARED)

    @several
    @parks
    @recognises
    def test_a_parked_second_delivery_is_dropped_when_the_first_ends(
        self, store: ParkingStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", run="run", want=SHARED)
        enter(store, "k", "b", lease=min(600.0, self.longest_lease))
        park(store, "k", "run", redelivered=True, want=SHARED)

        assert leave(store, "k", "a", run="run", completion=AGAIN) == []

        pass_time(40.0)
        assert swept(store) == []
        assert ask(store, "k", "c", run="run", redelivered=True, want=SHARED).status is DONE

    @several
    @parks
    def test_a_parked_second_delivery_runs_if_the_first_gives_up(self, store: ParkingStore) -> None:
        take(store, "k", "a", run="run", want=SHARED)
        enter(store, "k", "b")
        park(store, "k", "run", redelivered=True, want=SHARED)

        woken = leave(store, "k", "a", run="run")

        woken = woken or wait_until(lambda: swept(store), "a sweep")
        assert runs_of(woken) == ["run"]
        take(store, "k", "c", run="run", redelivered=True, want=SHARED)

    @several
    @parks
    def test_a_parked_second_delivery_runs_when_the_lease_of_the_first_has_ended(
        self, store: ParkingStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 30.0, run="run", want=SHARED)
        enter(store, "k", "b", lease=min(600.0, self.longest_lease))
        park(store, "k", "run", redelivered=True, want=SHARED)
        assert swept(store) == []
        pass_time(31.0)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]
        take(store, "k", "c", run="run", redelivered=True, want=SHARED)

    # Several keys

    @several
    @parks
    def test_one_that_stands_at_several_keys_waits_for_each_as_it_wants_it(
        self, store: ParkingStore
    ) -> None:
        enter(store, "k", "a", TWO)
        enter(store, "l", "b")

        replies = stand(store, "kl", wants=(TWO, Want()))

        assert [reply.status for reply in replies] == [RESERVED, PARKED]
        assert {each.owner for each in store.inspect("k").holders} == {"a", "parked:run"}
        (wake,) = leave(store, "l", "b")
        assert goes_on(store, wake) == [WokenTask("k", "run", b"run")]
        take(store, "k", "c", run="run", redelivered=True, want=TWO)
        take(store, "l", "d", run="run", redelivered=True)

    @several
    @parks
    def test_one_that_has_its_part_and_waits_elsewhere_keeps_nobody_from_entering(
        self, store: ParkingStore
    ) -> None:
        enter(store, "k", "a")
        take(store, "l", "b")
        stand(store, "kl", wants=(SHARED, Want()))

        take(store, "k", "c", want=SHARED)

        assert ask(store, "k", "d").status is BUSY

    @several
    @parks
    def test_one_that_waits_elsewhere_gives_its_part_to_one_who_came_before_it(
        self, store: ParkingStore
    ) -> None:
        enter(store, "k", "ab", TWO)
        take(store, "l", "c")
        take(store, "m", "d")
        stand(store, "mk", "elder", wants=(Want(), TWO))
        stand(store, "kl", "later", wants=(TWO, Want()))
        (wake,) = leave(store, "k", "a")
        assert goes_on(store, wake) == []  # "later" has its part, and waits for "l"

        (wake,) = leave(store, "m", "d")

        assert goes_on(store, wake) == [WokenTask("m", "elder", b"elder")]
        take(store, "k", "e", run="elder", redelivered=True, want=TWO)
        assert {each.owner for each in store.inspect("k").holders} == {"b", "e"}

    # Weights

    @weighs
    @parks
    def test_light_ones_wait_behind_a_heavy_one(self, store: ParkingStore) -> None:
        take(store, "k", "a", want=Want(3, 4))
        park(store, "k", "heavy", want=Want(4, 4))
        park(store, "k", "light", want=Want(1, 4))

        assert ask(store, "k", "newcomer", want=Want(1, 4)).status is BUSY
        assert runs_of(leave(store, "k", "a")) == ["heavy"]
        take(store, "k", "b", run="heavy", redelivered=True, want=Want(4, 4))
        woken = leave(store, "k", "b", run="heavy", completion=YES)
        assert runs_of(woken) == ["light"]

    @weighs
    @parks
    def test_what_one_gives_up_is_shared_out_to_as_many_as_fit(self, store: ParkingStore) -> None:
        take(store, "k", "a", want=Want(4, 4))
        for run, units in (("two", 2), ("one", 1), ("three", 3)):
            park(store, "k", run, want=Want(units, 4))

        assert runs_of(leave(store, "k", "a")) == ["two", "one"]
        assert store.inspect("k").used == 3

    @weighs
    @parks
    def test_one_who_is_here_takes_what_was_handed_to_one_who_came_later_and_is_not(
        self, store: ParkingStore
    ) -> None:
        take(store, "k", "a", want=Want(4, 4))
        early = ask(store, "k", "early", queue=store.inbox("k", "early"), want=Want(4, 4))
        store.release(ReleaseRequest("k", "early", inbox=store.inbox("k", "early")))
        park(store, "k", "late", want=Want(2, 4))
        wakes = leave(store, "k", "a")
        assert runs_of(wakes) == ["late"]

        take(store, "k", "back", arrival=early.arrival, want=Want(4, 4))

        assert store.inspect("k").waiting == 1  # it has its place back
        assert leave(store, "k", "back") == []  # it is on its way already
        take(store, "k", "b", run="late", redelivered=True, want=Want(2, 4))
