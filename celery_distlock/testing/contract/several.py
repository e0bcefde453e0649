"""Tests of keys with several holders: any number, or as many as a capacity has units."""

from collections.abc import Callable

import pytest

from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import ALONE, MOST_SLOTS, Ability, RenewOutcome, Want

from .actions import (
    BUSY,
    GRANTED,
    RESTS,
    SHARED,
    THREE,
    TWO,
    ask,
    enter,
    leave,
    renew,
    take,
    wait_for,
    wait_until,
)
from .given import Given

__all__ = ["SeveralContract"]


class SeveralContract(Given):
    """Test keys with several holders: ability ``SEVERAL``."""

    ability = Ability.SEVERAL

    @pytest.mark.parametrize("want", [ALONE, SHARED, TWO, THREE])
    @pytest.mark.parametrize(
        ("held", "owners"), [(ALONE, "a"), (SHARED, "ab"), (TWO, "a"), (THREE, "ab")]
    )
    def test_a_look_shows_whether_a_shared_request_would_be_granted(
        self, store: Store, held: Want, owners: str, want: Want
    ) -> None:
        enter(store, "k", owners, held)

        _, admits = store.inspect_for("k", want)

        assert admits is (ask(store, "k", "z", want=want).status is GRANTED)

    def test_any_number_share_a_key(self, store: Store) -> None:
        enter(store, "k", "abcdefghijkl")

    def test_no_request_is_granted_with_an_exclusive_holder(self, store: Store) -> None:
        take(store, "k", "a")

        for want in (SHARED, TWO):
            reply = ask(store, "k", "b", want=want)
            assert (reply.status, reply.holder) == (BUSY, "a")

    def test_no_request_is_exclusive_with_sharers(self, store: Store) -> None:
        enter(store, "k", "ab")

        reply = ask(store, "k", "c")

        assert reply.status is BUSY
        assert reply.holder in {"a", "b"}
        assert 0.0 < reply.remaining <= 30.1

    def test_so_many_hold_a_key_as_its_capacity_says_and_no_more(self, store: Store) -> None:
        enter(store, "k", "abc", THREE)

        assert ask(store, "k", "d", want=THREE).status is BUSY
        leave(store, "k", "b")
        take(store, "k", "d", want=THREE)
        assert ask(store, "k", "e", want=THREE).status is BUSY

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

    def test_a_repeated_request_has_what_it_had(self, store: Store) -> None:
        enter(store, "k", "ab", THREE)

        first, again = (ask(store, "k", "b", want=THREE) for _ in range(2))

        assert first.status is again.status is GRANTED
        assert (first.token, first.slot) == (again.token, again.slot)
        take(store, "k", "c", want=THREE)
        assert ask(store, "k", "d", want=THREE).status is BUSY

    def test_each_of_so_many_has_a_slot_of_its_own_the_lowest_that_is_free(
        self, store: Store
    ) -> None:
        slots = [ask(store, "k", owner, want=THREE).slot for owner in "abc"]
        leave(store, "k", "b")

        assert slots == [0, 1, 2]
        assert ask(store, "k", "d", want=THREE).slot == 1
        assert ask(store, "k", "a", want=THREE).slot == 0

    def test_those_whose_units_are_not_counted_one_by_one_have_no_slot(self, store: Store) -> None:
        assert ask(store, "alone", "a").slot == -1
        assert ask(store, "shared", "a", want=SHARED).slot == -1
        assert ask(store, "many", "a", want=Want(1, MOST_SLOTS + 1)).slot == -1
        assert ask(store, "some", "a", want=Want(1, MOST_SLOTS)).slot == 0

    def test_all_holders_of_a_phase_have_one_token_and_later_ones_a_greater(
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

    def test_one_that_leaves_takes_nothing_from_the_others(self, store: Store) -> None:
        enter(store, "k", "ab")

        leave(store, "k", "a")

        assert not store.release(ReleaseRequest("k", "a")).released
        assert not store.release(ReleaseRequest("k", "stranger")).released
        assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
        assert ask(store, "k", "c").status is BUSY
        leave(store, "k", "b")
        take(store, "k", "c")

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

    def test_one_that_renews_outlives_the_others(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        enter(store, "k", "ab", lease=2.0)
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        pass_time(2.0)

        assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.LOST]
        assert ask(store, "k", "c").status is BUSY
        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]

    def test_what_is_kept_for_a_run_is_what_its_holder_had(self, store: Store) -> None:
        enter(store, "k", "ab", TWO)
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run-again", 30.0)))

        assert ask(store, "k", "c", want=TWO).status is BUSY
        take(store, "k", "d", run="run-again", want=TWO)
        assert ask(store, "k", "c", want=TWO).status is BUSY
        leave(store, "k", "d", run="run-again")
        take(store, "k", "c", want=TWO)

    def test_a_look_shows_the_holder(self, store: Store) -> None:
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

    def test_a_look_at_an_exclusive_holder_shows_no_others(self, store: Store) -> None:
        take(store, "k", "a")

        state = store.inspect("k")

        assert (state.holders, state.capacity, state.owner) == ((), 1, "a")

    def test_one_that_would_fit_waits_behind_one_that_does_not(self, store: Store) -> None:
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

    def test_all_sharers_enter_together_up_to_the_next_request_that_does_not(
        self, store: Store
    ) -> None:
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

    def test_a_waiter_that_gives_up_keeps_later_ones_from_nothing(self, store: Store) -> None:
        enter(store, "k", "a")
        writer = wait_for(store, "k", "writer")
        reader = wait_for(store, "k", "reader", want=SHARED)

        store.release(ReleaseRequest("k", "writer", inbox=writer.inbox))

        take(store, "k", "reader", queue=reader.inbox, want=SHARED)

    def test_a_unit_that_was_handed_over_is_not_free_to_others(self, store: Store) -> None:
        enter(store, "k", "ab", TWO)
        waiter = wait_for(store, "k", "c", want=TWO)
        leave(store, "k", "a")

        assert ask(store, "k", "newcomer", want=TWO).status is BUSY
        take(store, "k", "c", queue=waiter.inbox, want=TWO)

    def test_a_second_delivery_is_not_granted_during_the_first(self, store: Store) -> None:
        take(store, "k", "a", run="run", want=THREE)

        reply = ask(store, "k", "b", run="run", redelivered=True, want=THREE)

        assert (reply.status, reply.holder_run) == (BUSY, "run")
        take(store, "k", "c", run="another", want=THREE)

    def test_one_of_several_units_rests_by_itself(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = Want(1, 2)
        enter(store, "k", "ab", want, lease=30.0)
        leave(store, "k", "a", keep_for=(RESTS, 1.0))

        assert ask(store, "k", "c", want=want).status is BUSY
        leave(store, "k", "b")
        take(store, "k", "b", 30.0, want=want)
        pass_time(1.0)

        wait_until(lambda: ask(store, "k", "c", want=want).status is GRANTED, "the end of the rest")
        assert ask(store, "k", "d", want=want).status is BUSY

    def test_two_units_rest_at_the_same_time(self, store: Store) -> None:
        want = Want(1, 2)
        enter(store, "k", "ab", want)
        for owner in "ab":
            leave(store, "k", owner, keep_for=(f"resting:{owner}", 30.0))

        assert ask(store, "k", "c", want=want).status is BUSY
        assert store.inspect("k").used == 2
