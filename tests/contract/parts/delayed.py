"""What is seen of calls that come later, of identities, and of what time alone lets in."""

import time
from collections.abc import Callable

import pytest

from celery_distlock.rate import Rate
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_parts import Bearer, Sent, Where
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import ALONE, Limit, ParkRequest, Want
from celery_distlock.testing.contract.actions import ask, found_keys, leave, take
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept
from tests.contract.parts.sending import send

__all__ = ["Delayed"]

RATE = Want(1, 0, (Rate(1, 600.0),))
OFTEN = Want(1, 0, (Rate(100, 600.0, 100),))


def _opens(store: Store, key: str) -> float:
    opens = store.inspect(key).opens
    assert opens is not None
    return opens


class Delayed(Given):
    """An operator sees what is there before anything waits, and takes it out."""

    def test_a_look_counts_delayed_waiters(self, store: QueueStore) -> None:
        take(store, "k", "a")
        for number, delay in enumerate([60.0, 30.0, 0.0]):
            send(store, "k", f"run{number}", delay=delay)

        state = store.inspect("k")

        assert (state.waiting, state.later) == (1, 2)
        assert 20.0 < state.due <= 30.01
        assert (store.inspect("l").later, store.inspect("l").due) == (0, 0.0)

    def test_a_look_for_a_request_shows_when_time_alone_admits_it(self, store: QueueStore) -> None:
        take(store, "k", "a", want=RATE)

        held, _ = store.inspect_for("k", ALONE)
        leave(store, "k", "a")
        state, admits = store.inspect_for("k", RATE)

        assert held.opens is None
        assert not admits
        assert state.opens is not None
        assert 590.0 < state.opens <= 604.0
        assert store.inspect("k").opens is None
        assert store.inspect_for("k", ALONE)[0].opens is None

    def test_a_run_that_has_come_by_a_message_does_not_come_later(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 300.0)
        for number in range(3):
            send(store, "k", f"run{number}", delay=60.0 + number)
        park(store, "k", "run0")
        park(store, "k", "other")

        assert [waiter.run for waiter in store.calls.delayed("k")] == ["run1", "run2"]
        assert store.inspect("k").later == 2
        pass_time(61.5)
        assert swept(store) == []
        queue = store.waiters("k")
        assert [waiter.run for waiter in queue] == ["run0", "other", "run1"]

    def test_one_that_ran_before_its_time_and_is_sent_again_does_not_come_later(
        self, store: QueueStore
    ) -> None:
        send(store, "k", "run", delay=60.0)
        take(store, "k", "a", run="run")
        leave(store, "k", "a", run="run")
        take(store, "k", "b")

        send(store, "k", "run")

        assert store.inspect("k").later == 0
        assert [waiter.run for waiter in store.calls.delayed("k")] == []

    def test_a_key_with_a_delayed_waiter_is_found(self, store: QueueStore) -> None:
        send(store, "k", "run", delay=30.0)

        assert found_keys(store) == ["k"]

    def test_delayed_runs_are_listed_by_their_time(self, store: QueueStore) -> None:
        for number, delay in enumerate([90.0, 30.0, 60.0]):
            send(store, "k", f"run{number}", delay=delay, want=Want(1, number + 1))

        listed = store.calls.delayed("k")

        assert [waiter.run for waiter in listed] == ["run1", "run2", "run0"]
        assert [waiter.want.capacity for waiter in listed] == [2, 3, 1]
        assert [waiter.task for waiter in listed] == 3 * ["shop.reserve"]
        assert not any(waiter.since or waiter.envelope or waiter.woken for waiter in listed)
        assert listed[0].due is not None
        assert 20.0 < listed[0].due <= 30.01
        assert [waiter.run for waiter in store.calls.delayed("k", first=1, limit=1)] == ["run2"]
        assert store.calls.delayed("l") == []

    def test_a_run_that_arrived_on_its_own_does_not_come_later(self, store: QueueStore) -> None:
        send(store, "k", "run", delay=30.0)
        take(store, "k", "a", run="run", redelivered=True)

        assert store.inspect("k").later == 0
        assert store.calls.delayed("k") == []

    # Time

    def test_a_look_says_when_a_rate_lets_the_first_in(self, store: Store) -> None:
        take(store, "k", "a", want=RATE)
        leave(store, "k", "a", started=True)
        assert store.inspect("k").opens is None
        park(store, "k", "run", want=RATE)

        assert 500.0 < _opens(store, "k") <= 601.0

    def test_a_wait_for_time_alone_is_reported(self, store: Store) -> None:
        take(store, "k", "a", want=RATE)
        leave(store, "k", "a", started=True)

        park_request = ParkRequest(b"", task="shop.reserve")
        first = ask(store, "k", "b", queue=park_request, run="run1", want=RATE)
        second = ask(store, "k", "c", queue=park_request, run="run2", want=RATE)

        assert 500.0 < (first.wait or 0.0) <= 601.0
        assert second.wait is None

    def test_a_request_blocked_by_time_alone_is_notified(self, store: Store) -> None:
        take(store, "k", "a", want=RATE)
        leave(store, "k", "a", started=True)
        inbox = store.inbox("k", "b")

        reply = ask(store, "k", "b", queue=inbox, want=RATE)

        inbox.close()
        assert 500.0 < (reply.wait or 0.0) <= 601.0

    def test_a_waiter_for_a_holder_waits_not_for_time(self, store: Store) -> None:
        take(store, "k", "a", want=Want(1, 1, OFTEN.rates))
        park(store, "k", "run", want=Want(1, 1, OFTEN.rates))

        assert store.inspect("k").opens is None

    def test_a_look_says_when_a_limit_lets_the_first_in(self, store: QueueStore) -> None:
        store.units.set_limit("k", Limit(0, time.time() + 60.0))
        park(store, "k", "run")

        assert 50.0 < _opens(store, "k") <= 61.0

    def test_a_look_says_when_a_rest_lets_the_first_in(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a", keep_for=("resting:1", 60.0))

        assert 50.0 < _opens(store, "k") <= 61.0

    # Identities

    def test_a_look_counts_the_identities_that_are_taken(self, store: QueueStore) -> None:
        take(store, "k", "a")
        for number in range(3):
            send(store, "k", f"task{number}:0:0:0", identity=Identity(f"i{number}"))
        store.parking.cancel("k", "task2:0:0:0")

        assert store.inspect("k").identities == 2
        assert store.inspect("l").identities == 0

    def test_an_identity_is_listed_with_its_run_and_where_that_is(self, store: QueueStore) -> None:
        send(store, "k", "coming:0:0:0", identity=Identity("a"))
        send(store, "k", "waiting:0:0:0", identity=Identity("b"))
        send(store, "k", "later:0:0:0", identity=Identity("c"), delay=30.0)

        assert store.calls.bearers("k") == {
            "a": Bearer("coming:0:0:0", Where.COMING),
            "b": Bearer("waiting:0:0:0", Where.WAITING),
            "c": Bearer("later:0:0:0", Where.WAITING),
        }
        assert len(store.calls.bearers("k", 2)) == 2
        assert store.calls.bearers("l") == {}

    def test_an_identity_without_a_run_is_not_listed(self, store: QueueStore) -> None:
        send(store, "k", "run", identity=Identity("same"))
        take(store, "k", "a", run="run", redelivered=True)

        assert store.calls.bearers("k") == {}
        assert store.inspect("k").identities == 0

    # Taking out

    @pytest.mark.parametrize("until", ["started", "finished", 600.0])
    @pytest.mark.parametrize("delay", [0.0, 30.0], ids=["waiting", "later"])
    def test_a_cancelled_run_frees_its_identity(
        self, store: QueueStore, delay: float, until: str | float
    ) -> None:
        take(store, "k", "a")
        identity = Identity("same", until)
        send(store, "k", "first:0:0:0", identity=identity, delay=delay)
        send(store, "k", "other:0:0:0", identity=Identity("other", until))

        assert store.parking.cancel("k", "first:0:0:0").released

        assert store.calls.peek("k", "same") is None
        other = store.calls.peek("k", "other")
        assert other is not None
        assert other[:2] == ("other:0:0:0", Where.WAITING)
        assert send(store, "k", "second:0:0:0", identity=identity).sent is Sent.QUEUED

    def test_a_cancelled_run_does_not_come_later(self, store: QueueStore) -> None:
        send(store, "k", "task:0:0:0", delay=30.0)
        assert list(store.parking.find_parked("task")) == [("k", "task:0:0:0")]

        assert store.parking.cancel("k", "task:0:0:0").released

        assert store.calls.delayed("k") == []
        assert store.inspect("k").later == 0

    def test_a_delayed_run_is_not_woken_before(self, store: QueueStore) -> None:
        send(store, "k", "run", delay=30.0)

        assert list(store.parking.wake_again("k")) == []

        assert [waiter.run for waiter in store.calls.delayed("k")] == ["run"]
