"""Stores that take in calls as they are sent."""

from collections.abc import Callable
from typing import Any

from celery_distlock.keys import slot_name
from celery_distlock.rate import Rate
from celery_distlock.stores.queue_parts import Claim, SendReply, Sent
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import Identity, ReleaseRequest, SendRequest
from celery_distlock.stores.values import Completion, Limit, ParkRequest, Want, WokenTask
from celery_distlock.testing.contract.actions import (
    AGAIN,
    DONE,
    YES,
    all_of,
    ask,
    enter,
    expire,
    holder,
    hostile_keys,
    hostile_runs,
    leave,
    runs_of,
    take,
    wait_for,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import any_envelope, park, swept
from tests.contract.parts.timing import claimed, wake

__all__ = ["Sending", "send"]


def send(
    store: QueueStore, key: str, run: str, envelope: bytes | None = None, **more: Any
) -> SendReply:
    """Send a run."""
    park_request = ParkRequest(run.encode() if envelope is None else envelope, task="shop.reserve")
    return store.calls.send(SendRequest(key, run, park_request, **more))


def _claim(store: QueueStore) -> Claim:
    """Claim what is due, when it is."""
    claim = wait_until(lambda: claimed(store), "a claim")
    assert claim is not None
    return claim


def _start_one(store: QueueStore) -> dict[str, Any]:
    """Use up the one start of a minute; return what the calls are sent with that it defers."""
    want = Want(1, 1, (Rate(1, 60.0),))
    take(store, "k", "a", run="first", want=want)
    leave(store, "k", "a", run="first", completion=YES)
    return {"want": want, "paced": True}


class Sending(Given):
    """A call that the store has taken in is started, once, in its turn, and never lost."""

    # Where it waits

    def test_a_run_that_is_sent_again_after_its_end_runs_again(self, store: QueueStore) -> None:
        send(store, "k", "run")
        take(store, "k", "a", run="run")
        leave(store, "k", "a", run="run", completion=Completion.UNSETTLED)
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert send(store, "k", "run").sent is Sent.GO

        take(store, "k", "b", run="run", redelivered=True)

    def test_a_run_that_is_sent_again_and_waits_is_cancelled(self, store: QueueStore) -> None:
        take(store, "k", "a", run="run")
        leave(store, "k", "a", run="run", completion=Completion.UNSETTLED)
        take(store, "k", "b", run="run")
        leave(store, "k", "b", run="run", completion=AGAIN)
        take(store, "k", "c")
        assert send(store, "k", "run").sent is Sent.QUEUED

        assert store.parking.cancel("k", "run").released

    def test_a_run_whose_key_is_free_goes_and_the_key_is_kept_for_it(
        self, store: QueueStore
    ) -> None:
        assert send(store, "k", "run") == SendReply(Sent.GO)

        state = store.inspect("k")
        assert (state.owner, state.woken, state.waiting) == ("parked:run", 1, 0)
        take(store, "k", "a", run="run", redelivered=True)
        assert leave(store, "k", "a", run="run", completion=YES) == []
        assert not store.inspect("k").woken

    def test_a_run_whose_key_is_taken_waits_its_turn(self, store: QueueStore) -> None:
        take(store, "k", "a")

        assert send(store, "k", "run", b"envelope") == SendReply(Sent.QUEUED)

        assert store.inspect("k").waiting == 1
        assert leave(store, "k", "a") == [WokenTask(slot_name("k"), "run", b"envelope")]

    @any_envelope
    def test_an_envelope_comes_as_it_was_sent(self, store: QueueStore, envelope: bytes) -> None:
        send(store, "k", "first", envelope)
        send(store, "k", "second", envelope)

        first = store.parking.parked("k", "first")
        take(store, "k", "a", run="first", redelivered=True)

        assert first is not None
        assert first.envelope == envelope
        (second,) = leave(store, "k", "a", run="first", completion=YES)
        assert second.envelope == envelope

    @hostile_keys
    def test_any_key_will_do(self, store: QueueStore, key: str) -> None:
        assert send(store, key, "first").sent is Sent.GO
        assert send(store, key, "second").sent is Sent.QUEUED

        take(store, key, "a", run="first", redelivered=True)

        assert runs_of(leave(store, key, "a", run="first", completion=YES)) == ["second"]

    @hostile_runs
    def test_any_run_will_do(self, store: QueueStore, run: str) -> None:
        assert send(store, "k", run).sent is Sent.GO
        assert send(store, "k", run).sent is Sent.GO
        assert send(store, "k", f"{run}, too").sent is Sent.QUEUED

        take(store, "k", "a", run=run, redelivered=True)

        assert runs_of(leave(store, "k", "a", run=run, completion=YES)) == [f"{run}, too"]

    def test_its_tasks_name_is_known(self, store: QueueStore) -> None:
        send(store, "k", "first")
        send(store, "k", "second")

        assert store.inspect("k").task == "shop.reserve"
        assert [waiter.task for waiter in store.waiters("k")] == ["shop.reserve"] * 2

    # Order

    def test_runs_go_in_the_order_in_which_they_were_sent(self, store: QueueStore) -> None:
        names = [f"run-{number}" for number in range(5)]
        replies = [send(store, "k", run).sent for run in names]

        ran = []
        for run in names:
            take(store, "k", "a", run=run, redelivered=True)
            ran += runs_of(leave(store, "k", "a", run=run, completion=YES))

        assert replies == [Sent.GO] + [Sent.QUEUED] * 4
        assert ran == names[1:]

    def test_a_sent_call_is_queued_behind_waiters(self, store: QueueStore) -> None:
        take(store, "k", "a")
        wait_for(store, "k", "b")
        park(store, "k", "parked")

        assert send(store, "k", "sent").sent is Sent.QUEUED

        waiting = [waiter.owner or waiter.run for waiter in store.waiters("k")]
        assert waiting == ["b", "parked", "sent"]

    def test_no_run_is_overtaken_by_a_later_one_while_the_first_is_in_flight(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "first")
        pass_time(30.0)
        expire(store, "k", "parked:first")

        reply = send(store, "k", "second")

        assert reply.sent is Sent.GO  # the first one has not come in time
        take(store, "k", "a", run="first", redelivered=True)  # and now it has
        assert holder(store, "k") == "a"
        assert ask(store, "k", "b", run="second", redelivered=True).status is not DONE
        assert holder(store, "k") == "a"
        assert leave(store, "k", "a", run="first", completion=YES) == []
        assert holder(store, "k") == "parked:second"  # which is in flight already

    def test_a_request_that_finds_a_free_key_with_others_waiting_admits_them_first(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 1.0)
        send(store, "k", "first")
        pass_time(1.5)
        expire(store, "k")

        reply = send(store, "k", "second")

        assert reply.sent is Sent.QUEUED
        assert runs_of(all_of(reply.wake)) == ["first"]

    # Several at a time

    def test_as_many_go_as_fit(self, store: QueueStore) -> None:
        replies = [send(store, "k", f"run-{n}", want=Want(1, 2)).sent for n in range(4)]

        assert replies == [Sent.GO, Sent.GO, Sent.QUEUED, Sent.QUEUED]
        take(store, "k", "a", run="run-0", redelivered=True, want=Want(1, 2))
        woken = leave(store, "k", "a", run="run-0", completion=YES)
        assert runs_of(woken) == ["run-2"]

    def test_no_request_passes_one_that_does_not_fit(self, store: QueueStore) -> None:
        enter(store, "k", "a", Want(1, 2))

        assert send(store, "k", "heavy", want=Want(2, 2)).sent is Sent.QUEUED
        assert send(store, "k", "light", want=Want(1, 2)).sent is Sent.QUEUED

        assert runs_of(leave(store, "k", "a")) == ["heavy"]

    def test_a_run_is_taken_in_at_a_key_that_is_paused(self, store: QueueStore) -> None:
        assert isinstance(store, QueueStore)
        store.units.set_limit("k", Limit(0))

        assert send(store, "k", "run").sent is Sent.QUEUED

        assert runs_of(all_of(store.units.set_limit("k", None).wake)) == ["run"]

    def test_a_run_that_waits_for_a_rest_alone_is_noted(self, store: QueueStore) -> None:
        take(store, "k", "a")
        leave(store, "k", "a", keep_for=("resting:1", 30.0))

        assert send(store, "k", "run").sent is Sent.QUEUED

        assert 29 < store.timetable.dues().first <= 30.1

    # Again

    def test_a_repeated_request_changes_nothing(self, store: QueueStore) -> None:
        first = send(store, "k", "first"), send(store, "k", "second")
        delayed = send(store, "k", "later", delay=30.0)

        assert (send(store, "k", "first"), send(store, "k", "second")) == first
        assert send(store, "k", "later", delay=30.0) == delayed

        state = store.inspect("k")
        assert (state.owner, state.waiting, state.woken) == ("parked:first", 1, 1)

    def test_a_run_that_has_its_key_is_not_taken_in_again(self, store: QueueStore) -> None:
        send(store, "k", "run")
        take(store, "k", "a", run="run", redelivered=True)

        assert send(store, "k", "run") == SendReply(Sent.QUEUED)

        assert leave(store, "k", "a", run="run", completion=YES) == []

    def test_a_task_that_has_ended_may_be_sent_again_by_its_id(self, store: QueueStore) -> None:
        for _ in range(2):
            assert send(store, "k", "run").sent is Sent.GO
            take(store, "k", "a", run="run", redelivered=True)
            leave(store, "k", "a", run="run", completion=AGAIN)

        assert ask(store, "k", "b", run="run", redelivered=True).status is DONE

    def test_a_second_delivery_of_what_was_sent_is_recognised(self, store: QueueStore) -> None:
        send(store, "k", "run")
        take(store, "k", "a", run="run", redelivered=True)
        send(store, "k", "other")

        leave(store, "k", "a", run="run", completion=AGAIN)

        assert ask(store, "k", "b", run="run", redelivered=True).status is DONE
        assert holder(store, "k") == "parked:other"

    # What a crash leaves behind

    def test_a_sweep_sends_what_its_sender_did_not_publish(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", b"envelope")
        assert swept(store) == []
        pass_time(2.1)

        (found,) = wait_until(lambda: swept(store), "a sweep")

        assert found == WokenTask(slot_name("k"), "run", b"envelope")

    def test_what_was_published_is_not_sent_again_soon(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run")
        store.parking.mark_published(WokenTask(slot_name("k"), "run", b""))
        send(store, "other", "run")
        pass_time(4.0)

        found = wait_until(lambda: swept(store), "a sweep")

        assert [each.name for each in found] == [slot_name("other")]

    def test_a_request_also_reports_what_was_published(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        for key in "klm":
            send(store, key, "run")

        known = [WokenTask(slot_name(key), "run", b"") for key in "kl"]
        send(store, "k", "other", published=known)

        pass_time(4.0)
        found = wait_until(lambda: swept(store), "a sweep")
        assert [each.name for each in found] == [slot_name("m")]

    # Later

    def test_a_run_that_is_not_due_blocks_no_other(self, store: QueueStore) -> None:
        assert send(store, "k", "later", delay=30.0) == SendReply(Sent.LATER)

        assert send(store, "k", "now").sent is Sent.GO
        assert store.inspect("k").waiting == 0

    def test_a_run_that_is_due_goes_by_the_ticker(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "late", b"envelope", delay=5.0)
        send(store, "k", "later", delay=30.0)
        assert 4 < store.timetable.dues().first <= 5.1
        assert claimed(store) is None
        pass_time(5.1)

        claim = _claim(store)

        again: dict[str, float | None] = {}
        assert list(store.parking.wake_due(claim.names, again)) == [
            WokenTask(slot_name("k"), "late", b"envelope")
        ]
        assert 20 < (again["k"] or 0) <= 25  # the other one

    def test_a_run_that_is_due_waits_for_the_holder(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 600.0)
        send(store, "k", "late", delay=1.0)
        send(store, "k", "first")
        pass_time(1.1)

        assert wake(store, _claim(store))[0] == []

        assert [waiter.run for waiter in store.waiters("k")] == ["first", "late"]
        assert runs_of(leave(store, "k", "a")) == ["first"]

    def test_a_sweep_finds_what_is_due_and_not_noted(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "late", delay=1.0)
        pass_time(1.1)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["late"]

    def test_a_key_is_remembered_while_a_run_waits_for_its_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "late", delay=90.0)
        pass_time(70.0)
        assert swept(store) == []
        pass_time(21.0)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["late"]

    # For operators

    def test_what_waits_and_what_is_not_due_is_found_and_cancelled(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        send(store, "k", "task-1:0:0:0")
        send(store, "k", "task-2:0:0:0", delay=1.0)

        for task_id in ("task-1", "task-2"):
            assert list(store.parking.find_parked(task_id)) == [("k", f"{task_id}:0:0:0")]
            assert store.parking.cancel("k", f"{task_id}:0:0:0").released

        pass_time(1.1)
        assert swept(store) == []
        assert leave(store, "k", "a") == []
        assert not list(store.parking.find_parked("task-2"))

    def test_a_run_that_goes_is_cancelled_for_the_next(self, store: QueueStore) -> None:
        send(store, "k", "run")
        send(store, "k", "other")

        cancelled = store.parking.cancel("k", "run")

        assert runs_of(all_of(cancelled.wake)) == ["other"]
        assert ask(store, "k", "a", run="run", redelivered=True).status is DONE

    # With others of its key

    def test_a_run_that_was_not_sent_waits_behind_one_that_was(self, store: QueueStore) -> None:
        send(store, "k", "sent")

        park(store, "k", "received")

        take(store, "k", "a", run="sent", redelivered=True)
        released = store.release(ReleaseRequest("k", "a", run="sent", completion=Completion.YES))
        assert runs_of(all_of(released.wake)) == ["received"]

    # Rates

    def test_a_paced_one_waits_for_its_rate_in_nobodys_way(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        want = Want(1, 1, (Rate(1, 60.0),))
        assert send(store, "k", "first", want=want, paced=True).sent is Sent.GO
        take(store, "k", "a", run="first", want=want, redelivered=True)
        leave(store, "k", "a", run="first", completion=YES)

        assert send(store, "k", "second", want=want, paced=True).sent is Sent.LATER
        assert send(store, "k", "other").sent is Sent.GO
        take(store, "k", "b", run="other", redelivered=True)
        leave(store, "k", "b", run="other", completion=YES)
        pass_time(58.0)
        assert swept(store) == []
        pass_time(2.5)

        (wake,) = wait_until(lambda: swept(store), "a sweep")
        assert wake.run == "second"

    def test_paced_ones_of_one_time_join_the_queue_in_the_order_of_their_calls(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        paced = _start_one(store)
        calls = ["d", "c", "b", "a"]
        for run in calls:
            send(store, "k", run, identity=Identity(run), **paced)
        send(store, "k", "d", b"new", identity=Identity("d", replaces="d"), **paced)

        assert [waiter.run for waiter in store.calls.delayed("k")] == calls
        pass_time(61.0)
        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["d"]
        assert [waiter.run for waiter in store.waiters("k")] == calls

    def test_a_paced_one_does_not_pass_those_whose_time_has_come(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        paced = _start_one(store)
        send(store, "k", "second", identity=Identity("second"), **paced)
        pass_time(61.0)

        send(store, "k", "third", identity=Identity("third"), **paced)

        assert runs_of(wait_until(lambda: swept(store), "a sweep")) == ["second"]

    def test_a_paced_one_is_deferred_no_longer_than_its_rate_lasts(self, store: QueueStore) -> None:
        paced: dict[str, Any] = {"want": Want(1, 1, (Rate(1, 0.2),)), "paced": True}
        assert send(store, "k", "first", **paced).sent is Sent.GO  # and has to come

        send(store, "k", "second", **paced)

        (waiter,) = store.calls.delayed("k")
        assert waiter.due is not None
        assert waiter.due <= 0.25

    def test_an_update_of_a_paced_one_leaves_it_its_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        paced, identity = _start_one(store), Identity("same")
        send(store, "k", "second", b"old", identity=identity, **paced)
        pass_time(30.0)

        again = identity._replace(replaces="second")
        assert send(store, "k", "second", b"new", identity=again, **paced).sent is Sent.UPDATED

        assert swept(store) == []
        pass_time(31.0)
        (wake,) = wait_until(lambda: swept(store), "a sweep")
        assert wake.envelope == b"new"

    def test_an_update_of_a_paced_one_with_another_rate_gives_it_the_time_of_that(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        long, short = Want(1, 1, (Rate(1, 3600.0),)), Want(1, 1, (Rate(1, 60.0),))
        identity = Identity("same")
        take(store, "k", "a", run="first", want=long)
        leave(store, "k", "a", run="first", completion=YES)
        send(store, "k", "second", b"old", identity=identity, want=long, paced=True)

        again = identity._replace(replaces="second")
        how: dict[str, Any] = {"identity": again, "want": short, "paced": True}
        assert send(store, "k", "second", b"new", **how).sent is Sent.UPDATED

        assert swept(store) == []
        pass_time(61.0)
        (wake,) = wait_until(lambda: swept(store), "a sweep")
        assert wake.envelope == b"new"
