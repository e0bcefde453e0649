"""Parked runs: their order, their messages, and what wakes them."""

from typing import Any

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    ALONE,
    Completion,
    ParkRequest,
    Reply,
    Sending,
    Status,
    Want,
    WokenTask,
)
from celery_distlock.testing.contract.actions import (
    BUSY,
    DONE,
    GRANTED,
    SHARED,
    TWO,
    YES,
    Waiter,
    enter,
    expire,
    holder,
    join_before_the_end,
    leave,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import PARKED, any_envelope, park, refuse, spoilt, swept, work

__all__ = ["Parking"]


class Parking(Given):
    """A parked run is kept until its turn comes, and then given to a process that can send it."""

    def test_a_blocked_request_with_a_reservation_for_its_run_stops_waiting(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        waiter = wait_for(store, "k", "b", run="run")
        leave(store, "k", "a")

        take(store, "k", "b", run="run", queue=waiter.inbox)

        assert store.inspect("k").waiting == 0
        leave(store, "k", "b", run="run", completion=YES)
        assert not holder(store, "k")

    def test_one_that_stepped_back_waits_no_more_if_it_is_cancelled(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        leave(store, "k", "a")
        take(store, "k", "elder", run="elder", queue=ParkRequest(b"e"), arrival=1_000_000)
        assert [waiter.run for waiter in store.waiters("k") if not waiter.woken] == ["run"]

        assert store.parking.cancel("k", "run").released

        assert store.inspect("k").waiting == 0

    def test_a_run_that_blocks_though_it_is_parked_has_one_part(self, store: Any) -> None:
        store.parking.park_if_held("k", "run", ParkRequest(b"e"), 10.0, want=SHARED)
        inbox = store.inbox("k", "a")

        take(store, "k", "a", run="run", queue=inbox, want=SHARED)

        assert [each.owner for each in store.inspect("k").holders] == ["a"]
        assert store.inspect("k").waiting == 0
        inbox.close()

    def test_a_run_that_is_parked_and_blocks_is_handed_one_part(self, store: Any) -> None:
        take(store, "k", "a")
        park(store, "k", "run", want=SHARED)
        waiter = wait_for(store, "k", "b", run="run", want=SHARED)
        leave(store, "k", "a")

        take(store, "k", "b", run="run", queue=waiter.inbox, want=SHARED)

        assert [each.owner for each in store.inspect("k").holders] == ["b"]
        assert store.inspect("k").waiting == 0

    def test_a_blocked_request_of_a_retry_gets_its_kept_key_and_stops_waiting(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", run="task:0:0:0")
        waiter = wait_for(store, "k", "b", run="task:1:0:0")
        leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 3000.0))

        take(store, "k", "b", run="task:1:0:0", redelivered=True, queue=waiter.inbox)

        assert store.inspect("k").waiting == 0
        leave(store, "k", "b", run="task:1:0:0", completion=YES)
        assert not holder(store, "k")

    def test_a_key_is_not_kept_for_a_run_that_waits_but_handed_to_it(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a", run="task:0:0:0")
        park(store, "k", "other", b"other")
        park(store, "k", "task:1:0:0", b"again")

        given = ReleaseRequest("k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 3000.0))
        released = store.release(given)

        assert released == (True, WokenTask(slot_name("k"), "task:1:0:0", b"again"))
        assert take(store, "k", "b", run="task:1:0:0", redelivered=True)
        assert store.release(ReleaseRequest("k", "b", run="task:1:0:0", completion=YES)).wake == (
            WokenTask(slot_name("k"), "other", b"other")
        )

    @any_envelope
    def test_a_release_returns_the_next_runs_envelope_as_it_was_parked(
        self, store: Store, envelope: bytes
    ) -> None:
        take(store, "k", "a")
        park(store, "k", "run", envelope)

        wake = store.release(ReleaseRequest("k", "a")).wake

        assert wake == WokenTask(slot_name("k"), "run", envelope)

    def test_a_parked_run_shows_the_holder_and_its_place(self, store: Store) -> None:
        take(store, "k", "a", run="run-a")
        park(store, "k", "first")

        reply = store.acquire(AcquireRequest("k", "b", 30.0, queue=ParkRequest(b"e"), run="second"))

        assert (reply.status, reply.holder, reply.holder_run, reply.place) == (
            PARKED,
            "a",
            "run-a",
            1,
        )

    def test_a_free_key_is_granted_and_not_parked_at(self, store: Store) -> None:
        reply = store.acquire(AcquireRequest("k", "a", 30.0, queue=ParkRequest(b"e"), run="run"))

        assert reply.status is GRANTED
        assert store.release(ReleaseRequest("k", "a", run="run", completion=YES)) == (True, None)

    def test_a_newcomer_does_not_overtake_a_parked_run_and_is_given_it_to_send(
        self, store: Store
    ) -> None:
        join_before_the_end(
            store, self.shortest_lease, lambda: park(store, "k", "run", b"envelope")
        )
        expire(store, "k")

        reply = store.acquire(AcquireRequest("k", "newcomer", 30.0))

        assert (reply.status, reply.holder, reply.holder_run) == (BUSY, "parked:run", "run")
        assert reply.wake == WokenTask(slot_name("k"), "run", b"envelope")

    def test_the_key_is_reserved_while_a_woken_run_is_in_flight(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))

        reply = store.acquire(AcquireRequest("k", "b", 30.0))

        assert (reply.status, reply.holder, reply.wake) == (BUSY, "parked:run", None)
        assert reply.remaining > 0

    def test_a_woken_run_claims_its_key_by_any_delivery(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        token = store.inspect("k").token

        assert take(store, "k", "another-worker", run="run") == token

        assert holder(store, "k") == "another-worker"
        assert store.inspect("k").remaining > 10

    def test_a_claimed_run_is_waiting_no_more(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "b", run="run")

        assert store.release(ReleaseRequest("k", "b", run="run", completion=YES)) == (True, None)
        assert swept(store) == []
        assert store.inspect("k").waiting == 0

    def test_a_late_woken_run_is_still_served_before_the_queue(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        store.release(ReleaseRequest("k", "a"))
        store.release(ReleaseRequest("k", "parked:run"))  # its reservation ends

        take(store, "k", new_owner("late"), run="run")

    def test_a_run_is_parked_once_however_often_it_comes(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"first")
        park(store, "k", "other")
        park(store, "k", "run", b"second")

        assert store.inspect("k").waiting == 2
        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "run", b"second"
        )

    def test_a_run_that_was_parked_and_claims_its_key_by_parking_again_is_recognised(
        self, store: Store
    ) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", keep_for=("run", 60.0)))
        again = AcquireRequest("k", "b", 60.0, queue=ParkRequest(b"envelope"), run="run")
        assert store.acquire(again).status is GRANTED
        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert store.acquire(again._replace(owner="c", redelivered=True)).status is DONE

    def test_a_woken_run_that_finds_the_key_taken_keeps_its_turn(self, store: QueueStore) -> None:
        self._pass_to_the_second(store)
        take(store, "k", "second", run="second", redelivered=True)

        park(store, "k", "first", redelivered=True)

        again = store.release(
            ReleaseRequest("k", "second", run="second", completion=Completion.YES)
        ).wake
        assert again is not None
        assert again.run == "first"

    def test_a_woken_run_has_the_key_before_a_later_one_that_has_not_come(
        self, store: QueueStore
    ) -> None:
        self._pass_to_the_second(store)

        take(store, "k", "first", run="first", redelivered=True)

        assert (
            store.acquire(
                AcquireRequest("k", "second", 30.0, run="second", redelivered=True)
            ).status
            is BUSY
        )

    def test_a_run_that_was_overtaken_in_flight_has_the_key_next_and_is_not_sent_again(
        self, store: QueueStore
    ) -> None:
        self._pass_to_the_second(store)
        park(store, "k", "third", redelivered=True)
        take(store, "k", "first", run="first", redelivered=True)

        assert (
            store.release(ReleaseRequest("k", "first", run="first", completion=Completion.YES)).wake
            is None
        )

        assert holder(store, "k") == "parked:second"
        take(store, "k", "second", run="second", redelivered=True)
        wake = store.release(
            ReleaseRequest("k", "second", run="second", completion=Completion.YES)
        ).wake
        assert wake is not None
        assert wake.run == "third"

    @staticmethod
    def _pass_to_the_second(store: QueueStore) -> None:
        """WokenTask two runs, one after the other: the first has not come in time."""
        take(store, "k", "a")
        park(store, "k", "first")
        park(store, "k", "second")
        for owner in ("a", "parked:first"):  # what ends a reservation in time, too
            wake = store.release(ReleaseRequest("k", owner)).wake
            assert wake is not None
            store.parking.mark_published(wake)
        assert holder(store, "k") == "parked:second"

    def test_a_waiter_that_comes_late_has_the_key_before_later_arrivals(self, store: Store) -> None:
        take(store, "k", "a")
        waiters = [Waiter(name, store.inbox("k", name)) for name in ("w1", "w2")]
        arrivals = [
            store.acquire(AcquireRequest("k", name, 30.0, queue=inbox)).arrival
            for name, inbox in waiters
        ]
        assert arrivals[0] < arrivals[1]
        store.release(ReleaseRequest("k", "a"))
        store.release(ReleaseRequest("k", "w1"))  # what ends its grant in time, too
        assert holder(store, "k") == "w2"

        take(store, "k", "w1", queue=waiters[0].inbox, arrival=arrivals[0])

        again = store.acquire(
            AcquireRequest("k", "w2", 30.0, queue=waiters[1].inbox, arrival=arrivals[1])
        )
        assert (again.status, again.arrival) == (BUSY, arrivals[1])
        store.release(ReleaseRequest("k", "w1"))
        assert holder(store, "k") == "w2"
        for waiter in waiters:
            waiter.inbox.close()

    def test_no_request_overtakes_an_earlier_one(self, store: Store) -> None:
        take(store, "k", "a")
        first, second = wait_for(store, "k", "w1"), wait_for(store, "k", "w2")
        store.release(ReleaseRequest("k", "a"))
        take(store, "k", "w1", queue=first.inbox)

        early = store.acquire(AcquireRequest("k", "w2", 30.0, queue=second.inbox, arrival=1))

        assert early.status is BUSY
        for waiter in (first, second):
            waiter.inbox.close()

    def test_lining_up_never_takes_a_free_key(self, store: QueueStore) -> None:
        status = store.parking.park_if_held("k", "run", ParkRequest(b"e"), 10.0).status

        assert status in {Status.FREE, PARKED}
        look = store.inspect("k")
        assert (look.token, look.waiting) == (0, int(status is PARKED))

    def test_one_that_lines_up_learns_whether_a_release_will_wake_it(
        self, store: QueueStore
    ) -> None:
        def line_up(key: str, run: str, want: Want = ALONE) -> Reply:
            return store.parking.park_if_held(key, run, ParkRequest(b"e"), 10.0, want=want)

        take(store, "taken", "a")
        enter(store, "shared", "a", TWO)
        enter(store, "full", "ab", TWO)

        assert line_up("free", "first").is_open
        assert not line_up("free", "second").is_open
        assert not line_up("taken", "run").is_open
        assert not line_up("shared", "alone").is_open
        assert not line_up("full", "run", TWO).is_open

    def test_an_arrival_before_those_in_line_takes_the_free_key(self, store: QueueStore) -> None:
        first = store.time(10.0)
        for number in (1, 2):
            park_request = ParkRequest(b"%d" % number)
            reply = store.parking.park_if_held(
                "k", f"run{number}", park_request, 10.0, first + number
            )
            assert (reply.status, reply.holder, reply.wake) == (PARKED, "", None)

        late = store.acquire(AcquireRequest("k", "late", 30.0, run="late", arrival=first + 3))
        assert late.status is BUSY
        assert late.wake == WokenTask(slot_name("k"), "run1", b"1")

        early = store.acquire(AcquireRequest("k", "early", 30.0, run="early", arrival=first))
        assert early.status is GRANTED
        wake = store.release(ReleaseRequest("k", "early")).wake
        assert wake is None  # it is in flight
        take(store, "k", "b", run="run1")
        assert store.release(ReleaseRequest("k", "b", run="run1")).wake == WokenTask(
            slot_name("k"), "run2", b"2"
        )

    def test_no_arrival_is_later_than_now(self, store: QueueStore) -> None:
        take(store, "k", "a")
        store.parking.park_if_held("k", "ahead", ParkRequest(b"1"), 10.0, store.time(10.0) + 10**12)
        store.parking.park_if_held("k", "next", ParkRequest(b"2"), 10.0)

        assert store.release(ReleaseRequest("k", "a")).wake == WokenTask(
            slot_name("k"), "ahead", b"1"
        )

    def test_the_first_in_line_is_woken_if_the_key_is_free(self, store: QueueStore) -> None:
        assert list(store.parking.wake_next("k")) == []
        store.parking.park_if_held("k", "run", ParkRequest(b"e"), 10.0)

        assert list(store.parking.wake_next("k")) == [WokenTask(slot_name("k"), "run", b"e")]
        assert list(store.parking.wake_next("k")) == []
        take(store, "k", "a", run="run")
        store.parking.park_if_held("k", "other", ParkRequest(b"o"), 10.0)
        assert list(store.parking.wake_next("k")) == []

    def test_lining_up_at_a_taken_key_parks_the_run_or_does_nothing(
        self, store: QueueStore
    ) -> None:
        take(store, "k", "a")

        status = store.parking.park_if_held("k", "run", ParkRequest(b"e"), 10.0).status

        assert status in {Status.FREE, PARKED}
        assert holder(store, "k") == "a"
        wake = WokenTask(slot_name("k"), "run", b"e") if status is PARKED else None
        assert store.release(ReleaseRequest("k", "a")) == (True, wake)

    def test_a_run_that_came_back_is_sent_by_the_next_sweep(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        assert swept(store) == []

        store.parking.mark_returned(wake)

        assert wait_until(lambda: swept(store), "a sweep") == [wake]

    def test_a_dropped_run_gives_its_key_to_the_next(self, store: Store) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        park(store, "k", "next")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        released = store.drop(wake)

        assert released.wake is not None
        assert released.wake.run == "next"
        assert holder(store, "k") == "parked:next"

    def test_a_run_that_was_dropped_is_not_sent_again(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "run")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        store.drop(wake)

        store.parking.mark_returned(wake)
        store.parking.mark_published(wake)

        assert swept(store) == []
        assert not store.inspect("k").token

    def test_dispatching_sends_and_notes_it(self, store: QueueStore) -> None:
        sent: list[WokenTask] = []
        store.publishers.known = (sent.append,)
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: sent, "its way")
        assert sent == [WokenTask(slot_name("k"), "run", b"envelope")]

    def test_what_cannot_be_dispatched_is_left_to_the_sweep(
        self, store: QueueStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(_: WokenTask) -> None:
            raise ConnectionRefusedError

        noted: list[WokenTask] = []
        store.publishers.known = (away,)
        monkeypatch.setattr(store.parking, "mark_published", noted.append)
        take(store, "k", "a")
        park(store, "k", "run")

        store.dispatch(store.release(ReleaseRequest("k", "a")).wake)

        wait_until(lambda: "the next sweep sends it" in caplog.text, "the warning")
        assert noted == []

    def test_an_unsendable_run_counts_as_sent_and_is_logged_once(
        self, store: QueueStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        noted: list[WokenTask] = []
        run = new_owner("run")  # of no other test
        store.publishers.known = (spoilt,)
        monkeypatch.setattr(store.parking, "mark_published", noted.append)
        take(store, "k", "a")
        park(store, "k", run, b"{ no json")
        wake = store.release(ReleaseRequest("k", "a")).wake

        store.dispatch(wake)
        store.dispatch(wake)

        assert noted == [wake, wake]
        assert "Traceback" not in caplog.text
        (record,) = [each for each in caplog.records if "cannot be sent" in each.getMessage()]
        assert "celery locks drop" in record.getMessage()

    def test_what_is_left_to_others_keeps_the_key_from_none(self, store: QueueStore) -> None:
        take(store, "k", "a")
        park(store, "k", "first")
        park(store, "k", "second")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        store.parking.mark_left(wake)

        assert holder(store, "k") == "parked:second"

    def test_what_is_left_to_others_is_swept_up_again_and_again(
        self, store: QueueStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.publishers.known = (refuse,)
        take(store, "k", "a")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None

        assert store.dispatch(wake) is not Sending.SENT

        for _ in range(2):
            assert wait_until(lambda: swept(store), "a sweep") == [wake]
            assert store.dispatch(wake) is not Sending.SENT
        assert caplog.text == ""

    def test_no_key_is_held_or_wanted_in_the_end(self, store: QueueStore) -> None:
        work(store)

        assert store.inspect("k").waiting == 0
        assert swept(store) == []
