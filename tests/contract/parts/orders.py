"""Waiters that are ahead of their arrival, and runs that are not passed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.requests import ReleaseRequest, SendRequest
from celery_distlock.stores.values import ALONE, Completion, ParkRequest, Status, Want
from celery_distlock.testing.contract.actions import all_of, ask, leave, runs_of, take
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept
from tests.contract.parts.lanes import Line
from tests.contract.parts.sending import send

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_distlock.stores.queue_store import QueueStore

__all__ = ["Ahead", "Strict"]


def ahead(seconds: float, name: str | None = None) -> Want:
    return Want(lane=name, ahead=round(1000 * seconds))


STRICT = Want(strict=True)


class Ahead(Given):
    """What is ahead waits as if it had come earlier."""

    def test_those_that_are_further_ahead_go_first(self, store: QueueStore) -> None:
        line = Line(store)
        for name, seconds in zip("habcd", (0.0, 0.0, 8.0, 3600.0, 15.0), strict=True):
            line.send(name, ahead(seconds))

        assert line.to_the_end() == "hcdba"

    def test_those_that_are_as_far_ahead_keep_the_order_of_their_calls(
        self, store: QueueStore
    ) -> None:
        token = take(store, "k", "holder")
        park(store, "k", "late:0:0:0", arrival=token + 900_000)  # all places follow it
        for name in "hgfedcba":
            send(store, "k", f"{name}:0:0:0", want=ahead(8.0))

        runs = [waiter.run[0] for waiter in store.waiters("k")]

        assert "".join(runs) == "hgfedcbal"

    def test_it_is_ahead_within_its_lane(self, store: QueueStore) -> None:
        line = Line(store)
        line.send("h", ALONE)
        line.send("a", ahead(0.0, "a"), 2)
        line.send("b", ahead(0.0, "b"), 2)
        line.send("c", ahead(8.0, "b"))

        assert line.to_the_end() == "hacabb"

    def test_what_it_is_ahead_does_not_count_as_waiting(self, store: QueueStore) -> None:
        now = take(store, "k", "holder") / 1e6
        send(store, "k", "behind")
        send(store, "k", "first", want=ahead(3600.0, "a"))

        assert now <= store.inspect("k").oldest < now + 60.0

    def test_one_that_is_far_ahead_goes_behind_one_for_which_its_key_is_kept(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "o", run="a:0:0:0")
        send(store, "k", "b", want=ahead(30 * 86400.0))
        park(store, "k", "a:1:0:0")
        request = ReleaseRequest("k", "o", "a:0:0:0", Completion.YES, keep_for=("a:1:0:0", 30.0))

        assert runs_of(all_of(store.release(request).wake)) == ["a:1:0:0"]


class Strict(Given):
    """A strict run that was dispatched is not passed."""

    def test_one_that_was_dispatched_is_not_passed(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        assert send(store, "k", "r1", want=STRICT).sent is Sent.GO
        assert send(store, "k", "r2", want=STRICT).sent is Sent.QUEUED

        for seconds in (30.0, 3600.0, 86400.0, 86400.0, 86400.0):
            pass_time(seconds)
            woken = list(store.parking.wake_next("k"))
            assert set(runs_of(woken)) <= {"r1"}
            for wake in woken:
                store.parking.mark_published(wake)
            assert ask(store, "k", "x").status is Status.BUSY

        take(store, "k", "o", run="r1", want=STRICT)
        assert runs_of(leave(store, "k", "o", run="r1", completion=Completion.YES)) == ["r2"]

    def test_one_that_waited_is_not_passed(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "o")
        for run in ("r1", "r2"):
            send(store, "k", run, want=STRICT)
        assert runs_of(leave(store, "k", "o")) == ["r1"]
        pass_time(100.0)

        assert set(runs_of(swept(store))) <= {"r1"}

    def test_one_that_came_before_it_does_not_pass_it(self, store: QueueStore) -> None:
        send(store, "k", "r1", want=STRICT)

        assert ask(store, "k", "earlier", arrival=2).status is Status.BUSY

    def test_the_next_one_goes_when_it_is_dropped(self, store: QueueStore) -> None:
        for run in ("r1", "r2"):
            send(store, "k", run, want=STRICT)

        assert runs_of(all_of(store.parking.cancel("k", "r1").wake)) == ["r2"]

    def test_the_next_one_goes_when_its_time_is_over(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        leaves = ParkRequest(b"r1", leaves=60.0)
        store.calls.send(SendRequest("k", "r1", leaves, want=STRICT))
        send(store, "k", "r2", want=STRICT)
        pass_time(61.0)

        assert "r2" in runs_of(swept(store))

    def test_the_next_one_does_not_go_because_it_is_left_to_other_workers(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "o")
        for run in ("r1", "r2"):
            send(store, "k", run, want=STRICT)
        (wake,) = leave(store, "k", "o")

        store.parking.mark_left(wake)

        assert store.inspect("k").owner == "parked:r1"
