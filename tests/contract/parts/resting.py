"""Keys that rest: no request is admitted for a while."""

from collections.abc import Callable

from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import RenewOutcome, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    GRANTED,
    RESTS,
    SHARED,
    ask,
    enter,
    leave,
    renew,
    runs_of,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept

__all__ = ["Resting"]


class Resting(Given):
    """A key stays taken for a while after its release, or admits no request for a while."""

    # What one had

    def test_a_waiter_for_resting_units_is_woken_when_they_have_rested(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        assert leave(store, "k", "a", keep_for=(RESTS, 1.5)) == []
        assert swept(store) == []
        pass_time(1.5)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run"]

    # A key

    def test_a_resting_key_admits_no_request_and_its_holders_go_on(self, store: QueueStore) -> None:
        enter(store, "k", "ab")

        assert store.units.rest("k", "a", 20.0)

        assert ask(store, "k", "c", want=SHARED).status is BUSY
        assert renew(store, ("k", "a", 30.0), ("k", "b", 30.0)) == [RenewOutcome.RENEWED] * 2
        assert ask(store, "k", "b", want=SHARED).status is GRANTED
        assert 0.0 < store.inspect("k").rest <= 20.1

    def test_a_key_rests_though_a_caller_blocks_for_it(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        store.units.rest("k", "a", 20.0)
        wait_for(store, "k", "b")

        leave(store, "k", "a")

        pass_time(5.0)
        assert 10.0 < store.inspect("k").rest <= 15.1

    def test_a_key_rests_though_it_has_no_holder_now(self, store: QueueStore) -> None:
        for name, want in (("shared", SHARED), ("alone", Want())):
            take(store, name, "a", want=want)
            store.units.rest(name, "a", 20.0)
            leave(store, name, "a")

            for other in (SHARED, Want(), Want(1, 5)):
                assert ask(store, name, "b", want=other).status is BUSY
            state = store.inspect(name)
            assert (state.owner, state.token, state.holders) == ("", 0, ())
            assert 0.0 < state.rest <= 20.1

    def test_a_key_that_has_rested_is_free_and_shared_with_a_greater_token(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for name, want in (("shared", SHARED), ("alone", Want())):
            before = take(store, name, "a", want=want)
            store.units.rest(name, "a", 1.0)
            leave(store, name, "a")
            pass_time(1.5)

            assert take(store, name, "b", want=SHARED) > before
            assert store.inspect(name).rest == 0.0

    def test_the_longer_of_two_rests_counts(self, store: QueueStore) -> None:
        enter(store, "k", "ab")
        store.units.rest("k", "a", 25.0)

        store.units.rest("k", "b", 5.0)

        assert 20.0 < store.inspect("k").rest <= 25.1

    def test_a_key_rests_as_long_as_was_said_though_it_was_had_alone_meanwhile(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for name, rests_when in (("before", "shared"), ("between", "alone")):
            take(store, name, "a", 1.0, want=SHARED)
            if rests_when == "shared":
                store.units.rest(name, "a", 20.0)
            store.units.upgrade(name, "a", 1.0)
            if rests_when == "alone":
                store.units.rest(name, "a", 20.0)
            store.units.downgrade(name, "a", 1.0)
            leave(store, name, "a")
        pass_time(1.5)

        for name in ("before", "between"):
            assert ask(store, name, "b", want=SHARED).status is BUSY
            assert store.inspect(name).rest > 10.0

    def test_a_key_rests_though_the_lease_that_began_the_rest_ends(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        wants = {"shared": SHARED, "alone": Want(), "upgraded": SHARED}
        for name, want in wants.items():
            take(store, name, "a", 1.0, want=want)
            store.units.rest(name, "a", 20.0)
        store.units.upgrade("upgraded", "a", 1.0)
        pass_time(1.5)

        for name in wants:
            for other in (SHARED, Want()):
                assert ask(store, name, "b", want=other).status is BUSY
            assert store.inspect(name).rest > 10.0
        pass_time(20.0)
        for name in wants:
            take(store, name, "b")

    def test_a_key_rests_though_a_second_attempt_has_had_it_meanwhile(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for name in ("comes", "stays away"):
            take(store, name, "a", 30.0, run="run:0:0:0")
            store.units.rest(name, "a", 20.0)
            leave(store, name, "a", run="run:0:0:0", keep_for=("run:1:0:0", 1.0))
        take(store, "comes", "b", 1.0, run="run:1:0:0")
        pass_time(1.5)

        for name in ("comes", "stays away"):
            assert ask(store, name, "c").status is BUSY

    def test_only_its_holder_lets_it_rest(self, store: QueueStore) -> None:
        assert not store.units.rest("k", "a", 20.0)
        enter(store, "k", "b")
        assert not store.units.rest("k", "a", 20.0)
        assert not store.inspect("k").rest

    def test_a_waiter_for_a_resting_key_is_woken_when_it_has_rested(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", want=SHARED)
        QueueStore.of(store).units.rest("k", "a", 1.5)
        for run in ("run1", "run2"):
            park(store, "k", run, want=SHARED)
        assert leave(store, "k", "a") == []
        assert swept(store) == []
        pass_time(1.5)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run1", "run2"]
