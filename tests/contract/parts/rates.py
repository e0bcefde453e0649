"""Keys that may be taken only so often."""

import time
from collections.abc import Callable
from typing import Any, cast

from celery_distlock.rate import Rate
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import ALONE, Limit, ParkRequest, Starts, Status, Want
from celery_distlock.testing.contract.actions import (
    BUSY,
    DONE,
    GRANTED,
    PATIENCE,
    YES,
    Waiter,
    ask,
    leave,
    runs_of,
    take,
    take_all,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, reserve_or_queue, swept, take_together

__all__ = ["Rates"]

PER = 600.0  # seconds
MORE = 1.0  # second: starts may be a little further apart than they have to be


def so_often(limit: int, per: float = PER, burst: int = 0, **more: Any) -> Want:
    """Share a key that may be taken so often; at once, if nothing is said of that."""
    return Want(1, 0, (Rate(limit, per, burst or limit),), **more)


def count(store: Store, key: str, want: Want, most: int = 20) -> int:
    """Take a key as often as it may be taken now; return how often that is."""
    for number in range(most):
        owner = f"counts-{number}"
        if ask(store, key, owner, want=want).status is not GRANTED:
            return number
        leave(store, key, owner, started=True)
    return most


def ensure_called(waiter: Waiter) -> None:
    """Have a waiter be called, and not only look after a pause."""
    since = time.monotonic()
    waiter.inbox.wait(PATIENCE)
    assert time.monotonic() < since + PATIENCE / 2


def due_in(store: Store, key: str, waiter: Waiter, want: Want) -> float:
    """Return in how many seconds the first waiter, which is not admitted yet, asks again."""
    reply = ask(store, key, waiter.owner, queue=waiter.inbox, want=want)
    assert (reply.status, reply.place) == (BUSY, 0)
    return reply.remaining


class Rates(Given):
    """In no time of its length begins more under a key than a rate allows."""

    def test_it_is_taken_as_often_as_the_limit_says(self, store: Store) -> None:
        assert count(store, "k", so_often(3)) == 3

    def test_one_too_many_gets_a_time_to_come(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        count(store, "k", so_often(3))
        pass_time(100.0 + MORE)

        reply = ask(store, "k", "b", want=so_often(3))

        assert reply.status is BUSY
        assert 400.0 < reply.due <= 500.0 + MORE

    def test_a_start_counts_for_the_time_of_its_rate(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(3)
        take(store, "k", "a", want=want)
        pass_time(300.0)
        assert count(store, "k", want) == 2

        pass_time(301.0)
        assert count(store, "k", want) == 1
        pass_time(300.0)
        assert count(store, "k", want) == 2

    def test_a_start_whose_answer_was_lost_counts_from_the_repeated_request(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)
        take(store, "k", "a", want=want)
        pass_time(20.0)

        assert ask(store, "k", "a", want=want).status is GRANTED
        leave(store, "k", "a", started=True)

        pass_time(590.0)
        assert 5.0 < ask(store, "k", "b", want=want).due <= 10.0 + MORE
        pass_time(10.0 + MORE)
        assert count(store, "k", want) == 1

    def test_starts_are_spaced_evenly(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(6, burst=1)
        assert count(store, "k", want) == 1

        reply = ask(store, "k", "b", want=want)

        assert 90.0 < reply.due <= 100.0 + MORE
        pass_time(100.0 + MORE)
        assert count(store, "k", want) == 1

    def test_a_burst_is_spaced_as_a_whole(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(6, burst=3)
        assert count(store, "k", want) == 3
        pass_time(100.0 + MORE)
        assert count(store, "k", want) == 1
        pass_time(500.0 + MORE)
        assert count(store, "k", want) == 3

    def test_two_rates_hold_at_once(self, store: Store, pass_time: Callable[[float], None]) -> None:
        want = Want(1, 0, (Rate(2, 60.0, 2), Rate(3, PER, 3)))
        assert count(store, "k", want) == 2
        pass_time(60.0 + MORE)
        assert count(store, "k", want) == 1
        pass_time(60.0 + MORE)
        assert count(store, "k", want) == 0

    def test_a_start_counts_as_many_as_it_costs(self, store: Store) -> None:
        assert count(store, "k", so_often(7, cost=3)) == 2
        assert count(store, "k", so_often(7)) == 1

    def test_a_request_that_is_repeated_is_one_start(self, store: Store) -> None:
        want = so_often(2)
        for _ in range(3):
            take(store, "k", "a", want=want)

        assert count(store, "k", want) == 1

    def test_an_exclusive_holder_has_a_rate_as_well(self, store: Store) -> None:
        want = so_often(2)._replace(capacity=1)

        assert count(store, "k", want) == 2

    def test_a_request_without_a_rate_neither_waits_nor_counts(self, store: Store) -> None:
        assert count(store, "k", so_often(2)) == 2
        assert count(store, "k", Want(1, 0), most=5) == 5
        assert count(store, "l", Want(1, 0), most=5) == 5
        assert count(store, "l", so_often(2)) == 2

    def test_a_limit_that_is_changed_counts_what_has_started(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        assert count(store, "k", so_often(3)) == 3
        assert count(store, "k", so_often(2)) == 0
        assert count(store, "k", so_often(5)) == 2
        assert count(store, "k", so_often(7, PER / 2)) == 2
        pass_time(PER / 2 + MORE)
        assert count(store, "k", so_often(7, PER / 2)) == 7

    def test_by_a_limit_that_is_lowered_one_waits_no_longer_than_it_says(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        assert count(store, "k", so_often(20)) == 20
        pass_time(100.0 + MORE)

        slower, slow = (ask(store, "k", "b", want=so_often(limit)) for limit in (1, 10))
        bursts = ask(store, "k", "b", want=so_often(10, burst=4))

        for reply in (slower, slow, bursts):
            assert reply.status is BUSY
            assert 400.0 < reply.due <= 500.0 + MORE
        pass_time(500.0 + MORE)
        assert count(store, "k", so_often(1)) == 1

    def test_by_a_limit_that_is_raised_one_starts_at_its_distances(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        assert count(store, "k", so_often(1)) == 1

        dues = [ask(store, "k", "b", want=so_often(limit, burst=1)).due for limit in (1, 2, 50)]

        assert dues[0] > PER - 10.0
        assert PER / 2 - 10.0 < dues[1] <= PER / 2 + MORE
        assert dues[2] <= PER / 50 + MORE
        pass_time(PER / 50 + MORE)
        assert count(store, "k", so_often(50, burst=1)) == 1

    def test_what_has_come_to_nothing_does_not_count(self, store: Store) -> None:
        for want in (so_often(2), so_often(2)._replace(capacity=1)):
            key = want.written()
            for number in range(5):
                take(store, key, f"a{number}", want=want)
                leave(store, key, f"a{number}", started=False)
                store.release(ReleaseRequest(key, f"a{number}", started=False))

            assert count(store, key, want) == 2

    def test_what_has_come_to_nothing_does_not_defer_the_next(self, store: Store) -> None:
        want = so_often(6, burst=1)
        take(store, "k", "a", want=want)
        leave(store, "k", "a", started=False)

        assert count(store, "k", want) == 1

    def test_a_key_that_was_refused_costs_the_others_nothing(self, store: Store) -> None:
        want = so_often(2)
        take(store, "l", "x")
        for _ in range(5):
            assert take_all(store, "kl", "ab", wants=(want, Want())) is None

        assert count(store, "k", want) == 2

    def test_all_of_several_keys_are_counted(self, store: Store) -> None:
        want = so_often(2)
        take_together(store, "kl", "ab", wants=(want, want))
        assert count(store, "k", want) == count(store, "l", want) == 1
        assert take_all(store, "kl", "cd", wants=(want, want)) is None

    def test_a_look_shows_how_often_it_was_taken(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        want = Want(1, 0, (Rate(9, 60.0, 9), Rate(20, PER, 20)))
        assert store.inspect("k").starts == ()
        for number in range(3):
            take(store, "k", f"a{number}", want=want)
        assert store.inspect("k").starts == (Starts(9, 60.0, 3), Starts(20, PER, 3))

        pass_time(60.0 + MORE)
        take(store, "k", "b", want=want)
        leave(store, "k", "b", started=True)

        assert store.inspect("k").starts == (Starts(9, 60.0, 1), Starts(20, PER, 4))

    # Waiters

    def test_a_waiter_is_woken_when_it_is_due(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(2)
        assert count(store, "k", want) == 2
        for run in ("run1", "run2", "run3"):
            park(store, "k", run, want=want)
        assert swept(store) == []
        pass_time(PER + MORE)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["run1", "run2"]

    def test_no_request_overtakes_a_waiter_for_its_rate(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(2)
        count(store, "k", want)
        park(store, "k", "run", want=want)

        assert ask(store, "k", "b", want=Want(1, 0)).status is BUSY
        pass_time(PER + MORE)
        assert ask(store, "k", "b", want=Want(1, 0)).status is GRANTED
        assert store.inspect("k").woken == 1

    def test_a_start_counts_from_when_it_is_reserved(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)._replace(capacity=5)
        take(store, "k", "a", want=Want())
        park(store, "k", "run", want=want)

        assert runs_of(leave(store, "k", "a")) == ["run"]

        assert ask(store, "k", "b", want=want).status is BUSY
        pass_time(4.0)
        take(store, "k", "c", run="run", want=want)
        pass_time(PER - 2.0)
        assert ask(store, "k", "b", want=want).status is BUSY
        pass_time(3.0)
        assert ask(store, "k", "b", want=want).status is GRANTED

    def test_an_unclaimed_reservation_is_no_start(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1, burst=1)._replace(capacity=5)
        take(store, "k", "a", want=Want())
        park(store, "k", "run", want=want)
        leave(store, "k", "a")

        pass_time(30.0)

        wait_until(lambda: ask(store, "k", "b", want=want).status is GRANTED, "its claim to lapse")
        assert ask(store, "k", "c", want=want).status is BUSY

    def test_a_run_that_is_dropped_in_flight_has_not_started(self, store: QueueStore) -> None:
        want = so_often(1)
        take(store, "k", "a", want=Want())
        park(store, "k", "run", want=want)
        (wake,) = leave(store, "k", "a")

        store.drop(wake)

        assert count(store, "k", want) == 1

    def test_what_was_kept_for_the_next_attempt_waits_for_its_rate_in_front(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)._replace(capacity=1)
        take(store, "k", "a", run="try-1", want=want)
        park(store, "k", "other", want=want)
        leave(
            store, "k", "a", run="try-1", completion=YES, keep_for=("try-2", 3000.0), started=True
        )

        park(store, "k", "try-2", want=want)

        assert [waiter.run for waiter in cast("Any", store).waiters("k")] == ["try-2", "other"]
        pass_time(PER + MORE)
        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["try-2"]

    def test_a_blocked_waiter_learns_when_to_check(self, store: Store) -> None:
        want = so_often(1)
        count(store, "k", want)
        waiter = wait_for(store, "k", "b", want=want)

        reply = ask(store, "k", "b", queue=waiter.inbox, want=want)

        assert reply.status is BUSY
        assert reply.place == 0
        assert PER - 30 < reply.remaining <= PER + MORE

    def test_a_blocked_waiter_is_called_when_it_is_next_and_gets_the_time_to_look(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        for number, capacity in enumerate((0, 5, 1)):
            key, want = f"k{number}", so_often(6, burst=1)._replace(capacity=capacity)
            count(store, key, want)
            waiters = [wait_for(store, key, f"{key}-{n}", want=want) for n in range(3)]
            store.release(ReleaseRequest(key, f"{key}-0", inbox=waiters[0].inbox))
            ensure_called(waiters[1])
            assert 0.0 < due_in(store, key, waiters[1], want) <= 100.0 + MORE

            pass_time(100.0 + MORE)
            take(store, key, waiters[1].owner, queue=waiters[1].inbox, want=want)
            leave(store, key, waiters[1].owner, started=True)

            ensure_called(waiters[2])
            assert 50.0 < due_in(store, key, waiters[2], want) <= 100.0 + MORE

    def test_it_is_noted_when_a_waiter_may_start(self, store: QueueStore) -> None:
        timed = QueueStore.of(store)
        want = so_often(1)
        count(store, "k", want)
        assert not timed.timetable.dues().many

        park(store, "k", "run", want=want)

        assert PER - 30 < timed.timetable.dues().first <= PER + MORE

    def test_a_run_that_lines_up_where_it_may_start_is_left_to_the_task_that_comes(
        self, store: QueueStore
    ) -> None:
        want = so_often(2)

        reply = store.parking.park_if_held("k", "run", ParkRequest(b"run"), PATIENCE, want=want)

        assert (reply.status, reply.due) == (Status.PARKED, 0.0)
        assert not QueueStore.of(store).timetable.dues().many

    def test_it_is_noted_when_a_run_that_lines_up_may_start(self, store: QueueStore) -> None:
        want = so_often(1)
        count(store, "k", want)

        store.parking.park_if_held("k", "run", ParkRequest(b"run"), PATIENCE, want=want)

        assert PER - 30 < QueueStore.of(store).timetable.dues().first <= PER + MORE

    def test_one_without_a_rate_admits_one_that_has_one(self, store: QueueStore) -> None:
        want = so_often(1)
        take(store, "k", "a")
        for run in ("run1", "run2"):
            park(store, "k", run, want=want)

        assert runs_of(leave(store, "k", "a")) == ["run1"]
        assert PER - 30 < QueueStore.of(store).timetable.dues().first <= PER + 30

    def test_a_run_at_several_keys_has_their_rates(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = so_often(1)
        count(store, "j", want)

        reply = reserve_or_queue(store, "jk", wants=(want, want))

        assert reply.status is Status.PARKED
        assert count(store, "k", want) == 1
        pass_time(PER + MORE)
        wake = wait_until(lambda: swept(store), "a sweep")[0]
        assert wake.run == "run"

    def test_no_start_is_kept_for_a_run_that_waits_for_another_key(self, store: QueueStore) -> None:
        want = so_often(2)
        take(store, "k", "a")
        for run in ("one", "other", "third"):
            assert reserve_or_queue(store, "jk", run, wants=(want, ALONE)).status is Status.PARKED

        assert count(store, "j", want) == 2

    def test_a_limit_goes_together_with_a_rate(self, store: Any) -> None:
        store.units.set_limit("k", Limit(0))

        reply = ask(store, "k", "a", want=so_often(1))

        assert (reply.status, reply.due) == (BUSY, 0.0)

    def test_a_second_delivery_of_what_has_ended_is_no_start(self, store: QueueStore) -> None:
        want = so_often(2)
        take(store, "k", "a", run="run", redelivered=True, want=want)
        leave(store, "k", "a", run="run", completion=YES, started=True)

        reply = ask(store, "k", "b", run="run", redelivered=True, want=want)

        assert reply.status in {DONE, GRANTED}
        if reply.status is DONE:
            assert count(store, "k", want) == 1
