"""Names of parked runs, and of their keys."""

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.testing.contract.actions import (
    AGAIN,
    DONE,
    hostile_keys,
    hostile_runs,
    take,
    wait_until,
)
from celery_distlock.testing.contract.given import Given
from tests.contract.parts.actions import park, swept

__all__ = ["ParkedText"]


class ParkedText(Given):
    """Park runs of any name, at keys of any name."""

    @hostile_keys
    def test_a_run_can_be_parked_at_any_key(self, store: QueueStore, key: str) -> None:
        take(store, key, "a")
        park(store, key, "run", b"envelope")

        wake = store.release(ReleaseRequest(key, "a")).wake
        assert wake is not None
        assert wake.envelope == b"envelope"
        store.parking.mark_published(wake)
        store.parking.mark_returned(wake)
        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        store.drop(wake)
        assert not store.inspect(key).token

    @hostile_runs
    def test_a_run_may_have_any_name(self, store: Store, run: str) -> None:
        take(store, "k", "a")
        park(store, "k", run)

        wake = store.release(ReleaseRequest("k", "a")).wake
        assert wake is not None
        assert wake.run == run
        take(store, "k", "b", run=run)
        store.release(ReleaseRequest("k", "b", run=run, completion=AGAIN))
        assert (
            store.acquire(AcquireRequest("k", "c", 30.0, run=run, redelivered=True)).status is DONE
        )
