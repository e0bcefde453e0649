"""What operators set for one key."""

import time
from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    Limit,
    ParkRequest,
    RenewOutcome,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    AGAIN,
    BUSY,
    GRANTED,
    SHARED,
    YES,
    all_of,
    ask,
    enter,
    found_keys,
    holder,
    leave,
    renew,
    runs_of,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept, take_together

__all__ = ["Limits"]


def park_and_pause(store: QueueStore, *runs: str, until: float = 0.0, want: Want = SHARED) -> None:
    """Have *runs* in flight to a key that is paused then."""
    take(store, "k", "a")
    for run in runs:
        park(store, "k", run, want=want)
    assert runs_of(leave(store, "k", "a")) == [*runs]
    store.units.set_limit("k", Limit(0, until))


class Limits(Given):
    """An operator's limit goes before what is asked with."""

    def test_no_more_enter_than_an_operator_allows(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(2))

        enter(store, "k", "ab", Want(1, 5))

        assert ask(store, "k", "c", want=Want(1, 5)).status is BUSY
        assert ask(store, "k", "c", want=SHARED).status is BUSY
        store.units.set_limit("k", None)
        take(store, "k", "c", want=Want(1, 5))

    def test_a_pause_holds_for_one_that_was_called_and_has_not_come(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        first, second = wait_for(store, "k", "b"), wait_for(store, "k", "c")
        leave(store, "k", "a")
        store.units.set_limit("k", Limit(0))

        assert ask(store, "k", "b", queue=first.inbox).status is BUSY

        assert ask(store, "k", "c", queue=second.inbox).status is BUSY
        store.units.set_limit("k", None)
        assert holder(store, "k") == "b"
        take(store, "k", "b", queue=first.inbox)

    def test_a_limit_may_be_more_than_is_asked_with(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(4))

        enter(store, "k", "abcd", Want(1, 2))

        assert ask(store, "k", "e", want=Want(1, 2)).status is BUSY

    def test_a_weight_above_a_limit_counts_as_all_of_it(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(2))

        take(store, "k", "a", want=Want(4, 8))

        assert ask(store, "k", "b", want=Want(1, 8)).status is BUSY
        leave(store, "k", "a")
        take(store, "k", "b", want=Want(1, 8))
        assert ask(store, "k", "a", want=Want(4, 8)).status is BUSY

    def test_what_is_in_use_is_what_was_asked_for_and_still_is_without_the_limit(
        self, store: QueueStore
    ) -> None:
        for name, capacity in (("lower", 2), ("one", 1), ("higher", 30)):
            store.units.set_limit(name, Limit(capacity))
            take(store, name, "a", want=Want(8, 24))
            assert store.inspect(name).used == 8
            store.units.set_limit(name, None)

            take(store, name, "b", want=Want(16, 24))
            assert ask(store, name, "c", want=Want(1, 24)).status is BUSY

    def test_it_still_is_when_one_was_alone_meanwhile(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(2))
        take(store, "k", "a", want=Want(8, 24))
        store.units.upgrade("k", "a", 30.0)
        store.units.downgrade("k", "a", 30.0)

        store.units.set_limit("k", None)

        assert ask(store, "k", "b", want=Want(17, 24)).status is BUSY
        take(store, "k", "b", want=Want(16, 24))

    def test_what_is_kept_under_a_limit_for_a_run_remains_its_own_without_it(
        self, store: QueueStore
    ) -> None:
        limits = QueueStore.of(store)
        limits.units.set_limit("k", Limit(2))
        take(store, "k", "a", want=Want(1, 24))
        park(store, "k", "run", want=Want(8, 24))
        assert runs_of(leave(store, "k", "a")) == ["run"]
        limits.units.set_limit("k", None)

        take(store, "k", "b", run="run", want=Want(8, 24))

        assert store.inspect("k").used == 8
        take(store, "k", "c", want=Want(16, 24))
        assert ask(store, "k", "d", want=Want(1, 24)).status is BUSY

    def test_of_several_keys_each_is_used_as_it_was_asked_for(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(2))
        take_together(store, "kl", "aa", wants=[Want(8, 24)] * 2)

        assert store.inspect("k").used == store.inspect("l").used == 8

    def test_no_holder_is_thrown_out_by_a_lower_limit(self, store: QueueStore) -> None:
        enter(store, "k", "abc")

        store.units.set_limit("k", Limit(1))

        assert renew(store, *[("k", owner, 30.0) for owner in "abc"]) == [RenewOutcome.RENEWED] * 3
        for owner in "abc":
            assert ask(store, "k", "d", want=SHARED).status is BUSY
            leave(store, "k", owner)
        take(store, "k", "d", want=SHARED)

    def test_a_limit_changes_nothing_for_an_exclusive_holder(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(3))

        take(store, "k", "a")

        assert ask(store, "k", "b").status is BUSY
        assert ask(store, "k", "b", want=SHARED).status is BUSY

    def test_no_request_is_exclusive_with_others_though_a_limit_leaves_room(
        self, store: QueueStore
    ) -> None:
        store.units.set_limit("k", Limit(5))
        enter(store, "k", "ab")

        assert ask(store, "k", "c").status is BUSY

    @pytest.mark.parametrize("want", [Want(), SHARED, Want(2, 5)])
    def test_a_paused_key_admits_no_request(self, store: QueueStore, want: Want) -> None:
        store.units.set_limit("k", Limit(0))

        assert ask(store, "k", "a", want=want).status is BUSY

        assert not store.inspect("k").token
        store.units.set_limit("k", None)
        take(store, "k", "a", want=want)

    def test_a_holder_of_a_paused_key_goes_on(self, store: QueueStore) -> None:
        take(store, "k", "a")
        store.units.set_limit("k", Limit(0))

        assert renew(store, ("k", "a", 30.0)) == [RenewOutcome.RENEWED]
        assert ask(store, "k", "a").status is GRANTED
        leave(store, "k", "a")
        assert ask(store, "k", "a").status is BUSY

    def test_several_keys_are_not_taken_if_one_is_paused(self, store: QueueStore) -> None:
        store.units.set_limit("l", Limit(0))

        assert store.acquire_all(["k", "l"], ["a", "b"], 30.0, run="run") is None

        take(store, "k", "c")

    def test_a_waiter_that_fits_is_woken_when_a_limit_is_raised(self, store: QueueStore) -> None:
        capacity = QueueStore.of(store)
        capacity.units.set_limit("k", Limit(1))
        take(store, "k", "a", want=Want(1, 5))
        for number in range(3):
            park(store, "k", f"run{number}", want=Want(1, 5))

        raised = capacity.units.set_limit("k", Limit(3))

        assert runs_of(all_of(raised.wake)) == ["run0", "run1"]
        assert runs_of(all_of(capacity.units.set_limit("k", None).wake)) == ["run2"]

    def test_a_task_that_comes_to_a_paused_key_waits_until_it_is_parked_again(
        self, store: QueueStore
    ) -> None:
        park_and_pause(store, "run")
        reply = ask(store, "k", "b", run="run", redelivered=True, want=SHARED)
        assert reply.status is BUSY
        store.units.set_limit("k", None)

        assert ask(store, "k", "c").status is BUSY

        again, arrival = ParkRequest(b"e"), reply.arrival
        take(store, "k", "b", run="run", queue=again, arrival=arrival, want=SHARED)
        assert store.inspect("k").waiting == 0

    def test_a_task_that_comes_to_a_paused_key_and_is_dropped_waits_no_more(
        self, store: QueueStore
    ) -> None:
        park_and_pause(store, "first", "second")
        for run in ("first", "second"):
            assert ask(store, "k", "b", run=run, redelivered=True, want=SHARED).status is BUSY

        store.drop(WokenTask(slot_name("k"), "second", b""))

        assert store.inspect("k").waiting == 1

    @pytest.mark.parametrize("completion", [AGAIN, Completion.UNSETTLED])
    def test_a_task_that_comes_to_a_paused_key_and_has_ended_waits_no_more(
        self, store: QueueStore, completion: Completion
    ) -> None:
        park_and_pause(store, "run")
        assert ask(store, "k", "b", run="run", redelivered=True, want=SHARED).status is BUSY

        store.release(ReleaseRequest("k", "b", run="run", completion=completion))

        assert store.inspect("k").waiting == 0

    def test_a_task_that_comes_to_a_paused_key_and_again_later_waits_no_more(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        park_and_pause(store, "run", until=time.time() + 60.0, want=ALONE)
        assert ask(store, "k", "b", run="run", redelivered=True).status is BUSY
        pass_time(61.0)

        take(store, "k", "b", run="run", redelivered=True)

        assert store.inspect("k").waiting == 0

    def test_a_retry_that_comes_early_to_a_paused_key_runs_when_it_goes_on(
        self, store: QueueStore
    ) -> None:
        capacity = QueueStore.of(store)
        take(store, "k", "a", run="task:0:0:0")
        park(store, "k", "task:1:0:0")
        park(store, "k", "other")
        capacity.units.set_limit("k", Limit(0))
        oldest = store.inspect("k").oldest
        assert leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 30.0)) == []

        state = store.inspect("k")

        assert (state.waiting, state.owner) == (2, "")
        assert oldest <= state.oldest < oldest + 600.0
        assert runs_of(all_of(capacity.units.set_limit("k", None).wake)) == ["task:1:0:0"]

    def test_a_waiter_for_a_paused_key_is_woken_when_it_goes_on(self, store: QueueStore) -> None:
        capacity = QueueStore.of(store)
        take(store, "k", "a")
        park(store, "k", "run1")
        park(store, "k", "run2")
        capacity.units.set_limit("k", Limit(0))
        assert leave(store, "k", "a") == []
        assert swept(store) == []

        assert runs_of(all_of(capacity.units.set_limit("k", None).wake)) == ["run1"]

        take(store, "k", "b", run="run1", redelivered=True)
        assert runs_of(leave(store, "k", "b", run="run1", completion=YES)) == ["run2"]

    def test_a_blocked_request_for_a_paused_key_has_it_when_it_goes_on(
        self, store: QueueStore
    ) -> None:
        store.units.set_limit("k", Limit(0))
        waiter = wait_for(store, "k", "a")

        store.units.set_limit("k", None)

        take(store, "k", "a", queue=waiter.inbox)

    def test_a_limit_ends_by_itself(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        QueueStore.of(store).units.set_limit("k", Limit(0, until=time.time() + 1.5))
        park(store, "k", "run")
        assert swept(store) == []
        pass_time(2.0)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]
        assert store.inspect("k").limit is None

    def test_a_look_shows_the_limit_and_its_author(self, store: QueueStore) -> None:
        now = time.time()
        store.units.set_limit("k", Limit(3, now + 60.0, "an operator", since=1.0))

        limit = store.inspect("k").limit

        assert limit is not None
        assert (limit.capacity, limit.author) == (3, "an operator")
        assert limit.until == pytest.approx(now + 60.0, abs=0.01)
        assert limit.since == pytest.approx(now, abs=60.0)
        store.units.set_limit("k", None)
        assert store.inspect("k").limit is None

    def test_the_last_limit_counts(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(0, author="one"))

        store.units.set_limit("k", Limit(2, author="another"))

        limit = store.inspect("k").limit
        assert limit is not None
        assert (limit.capacity, limit.until, limit.author) == (2, 0.0, "another")
        enter(store, "k", "ab", SHARED)

    def test_a_key_with_a_limit_is_found(self, store: QueueStore) -> None:
        QueueStore.of(store).units.set_limit("k", Limit(0))

        assert found_keys(store) == ["k"]
