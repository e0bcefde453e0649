"""Stores that know which calls are alike."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores.queue_parts import Bearer, SendReply, Sent, Where
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.requests import Identity
from celery_distlock.stores.values import Completion, Want, WokenTask
from celery_distlock.testing.contract.actions import (
    AGAIN,
    YES,
    expire,
    leave,
    runs_of,
    take,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept
from tests.contract.parts.sending import send

__all__ = ["Identities"]

SAME = Identity("same")


class Identities(Given):
    """An identity is taken exactly while its run is there, and by nothing else."""

    def test_a_waiting_run_has_its_identity(self, store: QueueStore) -> None:
        take(store, "k", "a")
        assert store.calls.peek("k", "same") is None

        send(store, "k", "run", identity=SAME)

        assert store.calls.peek("k", "same") == Bearer("run", Where.WAITING)
        assert store.calls.peek("k", "other") is None
        assert store.calls.peek("other", "same") is None

    @pytest.mark.parametrize("delay", [0.0, 30.0])
    def test_a_second_one_is_not_taken_in(self, store: QueueStore, delay: float) -> None:
        take(store, "k", "a")
        send(store, "k", "first", identity=SAME, delay=delay)

        assert send(store, "k", "second", identity=SAME) == SendReply(Sent.CHANGED)

        assert store.parking.parked("k", "second") is None
        assert send(store, "k", "third", identity=Identity("other")).sent is Sent.QUEUED

    def test_of_two_that_saw_no_holder_one_is_admitted(self, store: QueueStore) -> None:
        replies = [send(store, "k", run, identity=SAME).sent for run in ("r1", "r2")]

        assert replies == [Sent.GO, Sent.CHANGED]
        assert store.calls.peek("k", "same") == Bearer("r1", Where.COMING)

    def test_a_repeated_request_has_its_own_identity(self, store: QueueStore) -> None:
        assert send(store, "k", "run", identity=SAME).sent is Sent.GO

        assert send(store, "k", "run", identity=SAME).sent is Sent.GO

    # How long

    @pytest.mark.parametrize("want", [Want(), Want(1, 2)], ids=["exclusive", "shared"])
    @pytest.mark.parametrize("retain", [False, True])
    @pytest.mark.parametrize(
        ("until", "there"), [("started", False), ("finished", True), (30.0, True)]
    )
    def test_until_when_a_run_has_it(
        self, store: QueueStore, until: str | float, there: bool, retain: bool, want: Want
    ) -> None:
        send(store, "k", "run", identity=Identity("same", until), want=want)
        take(store, "k", "a", run="run", redelivered=True, retain=retain, want=want)

        assert _seen(store) == (("run", Where.RUNNING) if there else None)
        leave(store, "k", "a", run="run", completion=AGAIN)
        assert _seen(store) == (("run", Where.ENDED) if until == 30.0 else None)

    def test_while_its_result_is_stored_a_run_has_no_identity(self, store: QueueStore) -> None:
        send(store, "k", "run", identity=Identity("same", "finished"))
        take(store, "k", "a", run="run", redelivered=True, retain=True)

        leave(store, "k", "a", run="run", completion=Completion.UNSETTLED)

        assert store.calls.peek("k", "same") is None

    def test_time_ends_it(self, store: QueueStore, pass_time: Callable[[float], None]) -> None:
        send(store, "k", "run", identity=Identity("same", 1.0))
        take(store, "k", "a", run="run", redelivered=True)
        leave(store, "k", "a", run="run", completion=AGAIN)
        assert store.calls.peek("k", "same") is not None

        pass_time(1.5)

        assert store.calls.peek("k", "same") is None
        assert send(store, "k", "another", identity=Identity("same", 1.0)).sent is Sent.GO

    def test_until_that_time_no_other_call_is_admitted(self, store: QueueStore) -> None:
        send(store, "k", "run", identity=Identity("same", 30.0))
        take(store, "k", "a", run="run", redelivered=True)
        leave(store, "k", "a", run="run", completion=AGAIN)

        assert send(store, "k", "second", identity=SAME) == SendReply(Sent.CHANGED)
        assert send(store, "k", "other", identity=Identity("other")).sent is Sent.GO

    @pytest.mark.parametrize("end", ["cancel", "drop"])
    def test_a_run_that_is_removed_leaves_it(self, store: QueueStore, end: str) -> None:
        send(store, "k", "run", identity=Identity("same", "finished"))

        if end == "cancel":
            store.parking.cancel("k", "run")
        else:
            store.drop(WokenTask(slot_name("k"), "run", b""))

        assert store.calls.peek("k", "same") is None

    def test_a_holder_whose_lease_ends_leaves_it(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", identity=Identity("same", "finished"))
        take(store, "k", "a", 1.0, run="run", redelivered=True)
        assert store.calls.peek("k", "same") == Bearer("run", Where.RUNNING)
        pass_time(1.5)
        expire(store, "k")

        assert store.calls.peek("k", "same") is None

    def test_a_retry_is_of_the_same_task(self, store: QueueStore) -> None:
        identity = Identity("same", "finished")
        send(store, "k", "task:0:0:0", identity=identity)
        take(store, "k", "a", run="task:0:0:0", redelivered=True)

        again = send(store, "k", "task:1:0:0", identity=identity._replace(replaces="*"))

        assert again.sent is Sent.QUEUED
        leave(store, "k", "a", run="task:0:0:0", completion=YES)
        assert store.calls.peek("k", "same") == Bearer("task:1:0:0", Where.COMING)

    @pytest.mark.parametrize("want", [Want(), Want(1, 2)], ids=["exclusive", "shared"])
    def test_a_retry_waits_while_the_attempt_before_ends(
        self, store: QueueStore, want: Want
    ) -> None:
        send(store, "k", "task:0:0:0", identity=SAME, want=want)
        take(store, "k", "a", run="task:0:0:0", redelivered=True, want=want)
        assert store.calls.peek("k", "same") is None

        send(store, "k", "task:1:0:0", identity=SAME, delay=30.0, want=want)

        assert store.calls.peek("k", "same") == Bearer("task:1:0:0", Where.WAITING)

    def test_a_key_that_is_kept_for_a_retry_keeps_it(self, store: QueueStore) -> None:
        send(store, "k", "task:0:0:0", identity=Identity("same", "finished"))
        take(store, "k", "a", run="task:0:0:0", redelivered=True)

        leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 30.0))

        assert store.calls.peek("k", "same") == Bearer("task:0:0:0", Where.RUNNING)

    def test_units_that_are_kept_for_a_retry_keep_it(self, store: QueueStore) -> None:
        want = Want(1, 2)
        send(store, "k", "task:0:0:0", identity=Identity("same", "finished"), want=want)
        take(store, "k", "a", run="task:0:0:0", redelivered=True, want=want)
        take(store, "k", "b", run="other:0:0:0", want=want)

        leave(store, "k", "a", run="task:0:0:0", keep_for=("task:1:0:0", 30.0))

        assert store.calls.peek("k", "same") == Bearer("task:0:0:0", Where.RUNNING)

    @pytest.mark.parametrize("until", ["started", "finished"])
    def test_one_that_is_put_back_passes_it_on(self, store: QueueStore, until: str) -> None:
        send(store, "k", "task:0:0:0", identity=Identity("same", until))
        take(store, "k", "a", run="task:0:0:0", redelivered=True)
        park(store, "k", "task:0:1:0")

        assert swept(store) == []
        store.calls.inherit("k", Identity("same", until), "task:0:1:0")

        leave(store, "k", "a", run="task:0:0:0", completion=YES)
        assert store.calls.peek("k", "same") == Bearer("task:0:1:0", Where.COMING)

    def test_one_that_is_put_back_by_the_broker_passes_it_on(self, store: QueueStore) -> None:
        store.calls.inherit("k", Identity("same", 60.0), "task:0:1:0")

        assert _seen(store) == ("task:0:1:0", Where.ENDED)

    def test_it_has_the_time_for_which_a_run_has_it_in_any_case(self, store: QueueStore) -> None:
        send(store, "k", "run", identity=Identity("same", 30.0))

        found = store.calls.peek("k", "same")

        assert found is not None
        assert 25.0 < found.lasts <= 30.0

    def test_what_another_task_has_is_not_passed_on(self, store: QueueStore) -> None:
        take(store, "k", "a")
        send(store, "k", "task:0:0:0", identity=SAME)

        store.calls.inherit("k", SAME, "other:0:1:0")

        assert store.calls.peek("k", "same") == Bearer("task:0:0:0", Where.WAITING)

    # What is known of the run besides

    def test_a_run_that_expires_before_it_begins_has_none(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a")
        send(store, "k", "run", identity=SAME._replace(expires=30.0))
        found = store.calls.peek("k", "same")
        assert found is not None
        assert 0 < found.expires <= 30.1
        pass_time(31.0)

        assert store.calls.peek("k", "same") is None
        assert send(store, "k", "another", identity=SAME).sent is Sent.QUEUED

    def test_a_run_that_has_begun_does_not_expire(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", identity=Identity("same", "finished", expires=1.0))
        take(store, "k", "a", run="run", redelivered=True)

        pass_time(1.5)

        found = store.calls.peek("k", "same")
        assert found is not None
        assert found.where is Where.RUNNING

    def test_an_update_gives_it_another_time(self, store: QueueStore) -> None:
        take(store, "k", "a")
        identity = SAME._replace(expires=30.0, silent=True, most=60.0)
        send(store, "k", "run", identity=identity)
        found = store.calls.peek("k", "same")
        assert found is not None
        assert found.silent

        send(store, "k", "run", identity=SAME._replace(replaces="run"))

        assert store.calls.peek("k", "same") == Bearer("run", Where.WAITING)

    def test_one_is_sent_in_addition_to_the_waiting_one(self, store: QueueStore) -> None:
        take(store, "k", "a")
        send(store, "k", "first", identity=SAME._replace(fixed=True))
        assert store.calls.peek("k", "same") == Bearer("first", Where.WAITING, fixed=True)
        identity = SAME._replace(replaces="first")
        assert send(store, "k", "second", identity=identity).sent is Sent.CHANGED

        added = send(store, "k", "second", identity=identity._replace(beside=True))

        assert added.sent is Sent.QUEUED
        assert store.calls.peek("k", "same") == Bearer("second", Where.WAITING)
        assert store.inspect("k").waiting == 2

    # Those that are not second ones

    def test_one_with_a_waiting_caller_goes_without(self, store: QueueStore) -> None:
        take(store, "k", "a")
        send(store, "k", "first", identity=SAME)

        reply = send(store, "k", "second", identity=SAME._replace(replaces="*"))

        assert reply.sent is Sent.QUEUED
        assert store.calls.peek("k", "same") == Bearer("first", Where.WAITING)
        assert runs_of(leave(store, "k", "a")) == ["first"]

    def test_one_with_a_waiting_caller_takes_it_if_it_is_free(self, store: QueueStore) -> None:
        take(store, "k", "a")

        send(store, "k", "run", identity=SAME._replace(replaces="*"))

        assert store.calls.peek("k", "same") == Bearer("run", Where.WAITING)

    # Updates

    def test_an_update_keeps_the_place(self, store: QueueStore) -> None:
        take(store, "k", "a")
        send(store, "k", "first", b"old", identity=SAME)
        send(store, "k", "other")

        updated = send(store, "k", "first", b"new", identity=SAME._replace(replaces="first"))

        assert updated == SendReply(Sent.UPDATED)
        assert store.inspect("k").waiting == 2
        (wake,) = leave(store, "k", "a")
        assert (wake.run, wake.envelope) == ("first", b"new")

    def test_what_does_not_wait_any_more_is_not_updated(self, store: QueueStore) -> None:
        identity = SAME._replace(replaces="run")
        assert send(store, "k", "run", b"new", identity=identity).sent is Sent.CHANGED
        send(store, "k", "run", b"old", identity=SAME)

        assert send(store, "k", "run", b"new", identity=identity).sent is Sent.CHANGED

        found = store.parking.parked("k", "run")
        assert found is not None
        assert found.envelope == b"old"  # it is in flight

    def test_what_came_and_waits_again_is_not_updated(self, store: QueueStore) -> None:
        take(store, "k", "a")
        send(store, "k", "run", b"old", identity=SAME)
        park(store, "k", "run", b"old")  # another copy of that message may come

        update = send(store, "k", "run", b"new", identity=SAME._replace(replaces="run"))

        assert update.sent is Sent.CHANGED
        assert store.calls.peek("k", "same") == Bearer("run", Where.COMING)

    def test_one_that_is_in_flight_may_lose_it(self, store: QueueStore) -> None:
        send(store, "k", "first", identity=SAME)

        second = send(store, "k", "second", identity=SAME._replace(replaces="first"))

        assert second.sent is Sent.QUEUED
        assert store.calls.peek("k", "same") == Bearer("second", Where.WAITING)

    def test_an_update_moves_the_time(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", b"old", identity=SAME, delay=10.0)
        identity = SAME._replace(replaces="run")
        assert send(store, "k", "run", b"new", identity=identity, delay=60.0).sent is Sent.UPDATED
        pass_time(10.5)
        assert swept(store) == []

        reply = send(store, "k", "run", b"newest", identity=identity)

        assert reply == SendReply(Sent.GO)  # without a delay it is due
        found = store.parking.parked("k", "run")
        assert found is not None
        assert found.envelope == b"newest"

    def test_updates_do_not_put_it_off_for_ever(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", identity=Identity("same", most=25.0), delay=10.0)
        identity = Identity("same", replaces="run", most=25.0)
        for number in range(3):
            pass_time(8.0)
            envelope = b"%d" % number
            reply = send(store, "k", "run", envelope, identity=identity, delay=10.0)
            assert reply.sent is Sent.UPDATED
        pass_time(1.5)  # 25.5 s after the first one, and 1.5 s after the last one

        (wake,) = wait_until(lambda: swept(store), "a sweep")

        assert wake.envelope == b"2"

    def test_an_update_after_that_time_goes(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        send(store, "k", "run", identity=Identity("same", most=25.0), delay=20.0)
        pass_time(30.0)

        identity = Identity("same", replaces="run", most=25.0)
        assert send(store, "k", "run", b"new", identity=identity, delay=20.0).sent is Sent.GO


def _seen(store: QueueStore) -> tuple[str, Where] | None:
    """Return which run has the identity, and where that is."""
    bearer = store.calls.peek("k", "same")
    return bearer and (bearer.run, bearer.where)
