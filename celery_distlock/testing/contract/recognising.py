"""Tests of second deliveries of runs that have ended."""

from collections.abc import Callable

import pytest

from celery_distlock.keys import slot_name
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.values import Ability, Completion, Status, WokenTask

from .actions import (
    AGAIN,
    BUSY,
    DONE,
    RESTS,
    ask,
    holder,
    leave,
    take,
    unsettled,
    wait_for,
    wait_until,
)
from .given import Given

__all__ = ["RecogniseContract"]


class RecogniseContract(Given):
    """Test that second deliveries of ended runs are dropped: ability ``RECOGNISE``."""

    ability = Ability.RECOGNISE

    def test_a_second_delivery_of_a_finished_run_is_recognised(self, store: Store) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    @pytest.mark.parametrize("ended", [AGAIN, Completion.UNSETTLED])
    def test_a_second_delivery_that_blocks_does_not_run_when_the_first_has_ended(
        self, store: Store, ended: Completion
    ) -> None:
        take(store, "k", "a", run="run")
        waiter = wait_for(store, "k", "b", run="run", redelivered=True)
        other = wait_for(store, "k", "c")

        store.release(ReleaseRequest("k", "a", run="run", completion=ended))
        reply = store.acquire(
            AcquireRequest("k", "b", 30.0, queue=waiter.inbox, run="run", redelivered=True)
        )

        assert reply.status is (DONE if ended is AGAIN else BUSY)
        assert holder(store, "k") == "c" or not self.hands_over
        take(store, "k", "c", queue=other.inbox)
        store.release(ReleaseRequest("k", "c"))
        assert not holder(store, "k")

    def test_the_second_delivery_of_an_unsettled_run_does_not_run(self, store: Store) -> None:
        unsettled(store)

        reply = store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True))

        assert (reply.status, reply.holder_run) == (BUSY, "run")
        assert 25.0 < reply.remaining < 30.1
        assert not holder(store, "k")

    def test_the_second_delivery_of_a_run_that_is_settled_is_recognised(self, store: Store) -> None:
        unsettled(store)
        assert store.drop(WokenTask(slot_name("k"), "run", b"")).released

        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    def test_a_run_with_a_short_lease_has_five_seconds_to_be_settled(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", 0.5, run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED))

        pass_time(2.5)  # no longer, because real time passes as well
        assert (
            store.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is BUSY
        )

        pass_time(2.6)
        take(store, "k", "b", run="run", redelivered=True)

    def test_a_run_that_ended_in_one_process_is_recognised_by_another(
        self, store: Store, another: Store
    ) -> None:
        take(store, "k", "a", run="run")
        store.release(ReleaseRequest("k", "a", run="run", completion=AGAIN))

        assert (
            another.acquire(AcquireRequest("k", "b", 30.0, run="run", redelivered=True)).status
            is DONE
        )

    def test_a_run_that_has_ended_does_not_run_again_when_its_key_has_rested(
        self, store: Store, pass_time: Callable[[float], None]
    ) -> None:
        take(store, "k", "a", run="run", redelivered=True)
        leave(store, "k", "a", run="run", completion=AGAIN, keep_for=(RESTS, 1.0))

        assert ask(store, "k", "b", run="run", redelivered=True).status in {BUSY, DONE}
        pass_time(1.0)

        def status() -> Status:
            return ask(store, "k", "b", run="run", redelivered=True).status

        wait_until(lambda: status() is not BUSY, "the end of the rest")
        assert status() is DONE
