"""Parked runs that leave their queue after some time, without their key."""

from collections.abc import Callable
from typing import Any

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, StandRequest
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.queue_store import QueueStore, reserve_or_queue
from celery_distlock.stores.requests import Identity, ReleaseRequest, SendRequest
from celery_distlock.stores.values import Completion, ParkRequest, Route, Status, WokenTask
from celery_distlock.testing.contract.actions import (
    BUSY,
    ask,
    holder,
    leave,
    runs_of,
    take,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import PARKED, park, swept

__all__ = ["Leaving"]

PassTime = Callable[[float], None]


def _park(store: QueueStore, run: str, leaves: float) -> None:
    request = ParkRequest(run.encode(), task="shop.reserve", leaves=leaves)
    asked = AcquireRequest("k", new_owner("delivery"), 300.0, queue=request, run=run)
    assert store.acquire(asked).status is PARKED


def _wait_too_long(store: QueueStore, pass_time: PassTime) -> None:
    """Have a run wait behind a holder until its time is over."""
    take(store, "k", "a", lease=300.0)
    _park(store, "run", 60.0)
    pass_time(61.0)


def _call(store: QueueStore, **terms: Any) -> Sent:
    """Send a call that waits for a minute."""
    request = ParkRequest(b"run", leaves=60.0)
    return store.calls.send(SendRequest("k", "run", request, **terms)).sent


def _looked_at(store: QueueStore) -> tuple[list[WokenTask], float | None]:
    """Look at the key as the ticker does; return what to send, and when it is due again."""
    again: dict[str, float | None] = {}
    sent = list(store.parking.wake_due([slot_name("k")], again))
    return sent, again[slot_name("k")]


class Leaving(Given):
    """A run leaves its queue at its time, once, if it waits then."""

    def test_it_is_sent_though_its_key_is_held(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        _wait_too_long(store, pass_time)

        (wake,), _ = _looked_at(store)

        assert (wake.run, wake.envelope) == ("run", b"run")
        assert store.inspect("k").waiting == 0
        assert holder(store, "k") == "a"

    def test_a_look_at_the_queue_shows_how_long_it_may_wait(
        self, store: Any, pass_time: PassTime
    ) -> None:
        take(store, "k", "a", lease=300.0)
        _park(store, "run", 60.0)
        park(store, "k", "other")
        pass_time(20.0)

        run, other = store.waiters("k")

        assert 30.0 < run.leaves <= 40.0
        assert other.leaves is None

    def test_it_waits_until_then(self, store: QueueStore, pass_time: PassTime) -> None:
        take(store, "k", "a", lease=300.0)
        _park(store, "run", 60.0)
        pass_time(40.0)

        sent, again = _looked_at(store)

        assert sent == []
        assert again is not None
        assert 10.0 < again <= 20.0
        assert store.inspect("k").waiting == 1

    def test_the_ticker_knows_the_time(self, store: QueueStore) -> None:
        take(store, "k", "a")
        _park(store, "run", 60.0)

        dues = store.timetable.dues()

        assert dues.many == 1
        assert 30.0 < dues.first <= 60.0

    def test_a_sweep_finds_it(self, store: QueueStore, pass_time: PassTime) -> None:
        _wait_too_long(store, pass_time)

        found = wait_until(lambda: swept(store), "a sweep")

        assert runs_of(found) == ["run"]

    def test_one_that_has_its_key_is_left_alone(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        take(store, "k", "a", lease=300.0)
        _park(store, "run", 60.0)
        leave(store, "k", "a")
        take(store, "k", "b", lease=300.0, run="run", redelivered=True)
        park(store, "k", "next")
        pass_time(61.0)

        sent, again = _looked_at(store)

        assert (sent, again) == ([], None)
        assert holder(store, "k") == "b"

    def test_it_finds_its_key_taken_and_can_end(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        take(store, "k", "a", lease=300.0)
        _park(store, "run", 60.0)
        park(store, "k", "next")
        pass_time(61.0)
        (wake,), _ = _looked_at(store)

        assert ask(store, "k", "b", run="run", redelivered=True).status is BUSY
        assert store.drop(wake).released

        assert store.parking.parked("k", "run") is None
        assert ask(store, "k", "b", run="run", redelivered=True).status is Status.DONE
        state = store.inspect("k")
        assert (state.waiting, state.woken) == (1, 0)

    def test_it_may_wait_again_at_its_place(self, store: QueueStore, pass_time: PassTime) -> None:
        take(store, "k", "a", lease=300.0)
        _park(store, "run", 60.0)
        park(store, "k", "next")
        pass_time(61.0)
        _looked_at(store)

        _park(store, "run", 60.0)

        waiting = [waiter.run for waiter in store.waiters("k")]
        assert waiting == ["run", "next"]
        pass_time(61.0)
        sent, _ = _looked_at(store)
        assert runs_of(sent) == ["run"]

    def test_many_leave_in_turn(self, store: QueueStore, pass_time: PassTime) -> None:
        take(store, "k", "a", lease=300.0)
        runs = [f"run{number:03}" for number in range(250)]
        for run in runs:
            _park(store, run, 60.0)
        pass_time(61.0)

        left: list[str] = []
        for _ in range(10):
            sent, again = _looked_at(store)
            left += runs_of(sent)

        assert sorted(left) == runs
        assert store.inspect("k").waiting == 0
        assert again is None

    def test_a_run_of_several_keys_leaves_all_of_them(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        for key, owner in (("k", "a"), ("l", "b")):
            take(store, key, owner, lease=300.0)
        leave(store, "k", "a")
        names = tuple(map(slot_name, "kl"))
        request = ParkRequest(b"run", leaves=60.0)
        assert (
            reserve_or_queue(store, StandRequest("run", Route(names), 0, request)).status is PARKED
        )
        pass_time(61.0)

        (wake,), _ = _looked_at(store)

        assert wake.run == "run"
        for key in "kl":  # as a task that ends without its keys does
            store.drop(WokenTask(slot_name(key), "run", b""))
            store.release(ReleaseRequest(key, "delivery", "run", Completion.YES))
        assert store.inspect("l").waiting == 0
        assert not holder(store, "k")

    def test_a_call_leaves_too(self, store: QueueStore, pass_time: PassTime) -> None:
        take(store, "k", "a", lease=300.0)
        assert _call(store) is Sent.QUEUED
        pass_time(61.0)

        sent, _ = _looked_at(store)

        assert runs_of(sent) == ["run"]

    def test_a_deferred_call_does_not_leave_before_it_has_joined(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        take(store, "k", "a", lease=900.0)
        assert _call(store, delay=100.0) is Sent.LATER
        pass_time(61.0)
        sent, again = _looked_at(store)
        assert sent == []
        assert again is not None
        assert 10.0 < again <= 39.1

        pass_time(40.0)
        sent, _ = _looked_at(store)

        assert runs_of(sent) == ["run"]

    def test_its_identity_is_free_when_it_has_ended(
        self, store: QueueStore, pass_time: PassTime
    ) -> None:
        take(store, "k", "a", lease=300.0)
        _call(store, identity=Identity("same", until="finished"))
        pass_time(61.0)
        (wake,), _ = _looked_at(store)
        bearer = store.calls.peek("k", "same")
        assert bearer is not None
        assert bearer.run == "run"

        store.drop(wake)

        assert store.calls.peek("k", "same") is None
