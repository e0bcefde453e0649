"""Messages that the store alone has, until their run has ended."""

from collections.abc import Callable

from celery_distlock import clock
from celery_distlock.keys import slot_name
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import (
    Completion,
    RenewOutcome,
    WokenTask,
)
from celery_distlock.testing.contract.actions import YES, holder, renew, take, wait_until
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import kept, park, swept

__all__ = ["Retaining"]


class Retaining(Given):
    """A run whose only copy is in the store is kept there until it has ended."""

    def test_a_kept_run_is_sent_again_if_its_process_dies(self, store: QueueStore) -> None:
        wake = kept(store, self.shortest_lease)

        (again,) = wait_until(lambda: swept(store), "the run to be swept up")

        assert again == wake._replace(returned=True)

    def test_a_kept_run_that_came_back_says_so_however_often_it_is_sent(
        self, store: QueueStore
    ) -> None:
        wake = kept(store, 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.NO))
        for _ in range(2):
            store.parking.mark_returned(wake)

            (again,) = wait_until(lambda: swept(store), "the run to be swept up")

            assert again.returned
            store.parking.mark_published(again)
            (again,) = store.parking.wake_again("k")
            assert again.returned

    def test_a_kept_run_that_came_back_is_sent_when_its_process_is_gone(
        self, store: QueueStore
    ) -> None:
        wake = kept(store, 30.0)
        store.parking.mark_returned(wake)
        for _ in range(2):
            assert list(store.parking.wake_next("k")) == []

        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.NO))

        (again,) = store.parking.wake_next("k")
        assert again == wake._replace(returned=True)

    def test_a_kept_run_that_is_parked_again_has_not_come_back(self, store: QueueStore) -> None:
        kept(store, 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.NO))
        take(store, "k", "c")
        park(store, "k", "run", b"envelope")
        wake = store.release(ReleaseRequest("k", "c")).wake
        assert wake is not None

        store.parking.mark_returned(wake)

        (again,) = wait_until(lambda: swept(store), "the run to be swept up")
        assert not again.returned

    def test_a_kept_run_is_not_sent_again_while_it_runs(self, store: QueueStore) -> None:
        lease = 2 * self.shortest_lease
        kept(store, lease)
        wait_until(  # at once, but for a machine that is too busy to ask before the end
            lambda: (
                take(store, "k", "b", lease, run="run", retain=True)
                and renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
            ),
            "a renewal in time",
        )
        until = clock.monotonic() + 2 * lease
        while clock.monotonic() < until:
            assert renew(store, ("k", "b", 30.0)) == [RenewOutcome.RENEWED]
            assert swept(store) == []

    def test_a_kept_run_is_forgotten_when_it_has_ended(self, store: QueueStore) -> None:
        kept(store, 30.0)

        store.release(ReleaseRequest("k", "b", run="run", completion=YES))

        assert swept(store) == []
        assert not holder(store, "k")

    def test_a_kept_run_that_is_never_settled_runs_again(
        self, store: QueueStore, pass_time: Callable[[float], None]
    ) -> None:
        kept(store, self.shortest_lease)
        take(store, "k", "b", 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))
        assert swept(store) == []

        pass_time(31.0)

        (wake,) = wait_until(lambda: swept(store), "the run to be swept up")
        assert wake.run == "run"

    def test_a_kept_unsettled_run_whose_message_came_back_is_sent_at_once(
        self, store: QueueStore
    ) -> None:
        kept(store, self.shortest_lease)
        take(store, "k", "b", 30.0)
        store.release(ReleaseRequest("k", "b", run="run", completion=Completion.UNSETTLED))

        store.parking.mark_returned(WokenTask(slot_name("k"), "run", b""))

        (wake,) = wait_until(lambda: swept(store), "the run to be swept up")
        assert wake.run == "run"
        take(store, "k", "c", run="run", redelivered=True)
