"""Keys and runs of any text."""

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.parking import ParkingStore
from celery_distlock.stores.values import (
    RenewOutcome,
)

from .actions import (
    AGAIN,
    BUSY,
    DONE,
    HOSTILE_KEYS,
    PATIENCE,
    hostile_keys,
    hostile_runs,
    park,
    parks,
    recognises,
    renew,
    swept,
    take,
    wait_for,
    wait_until,
    waits,
)
from .given import Given

__all__ = ["AnyText"]


class AnyText(Given):
    """A key and a run may be any text."""

    @hostile_keys
    def test_a_key_may_hold_any_text(self, store: Store, key: str) -> None:
        token = take(store, key, "a")
        assert store.acquire(AcquireRequest(key, "b", 30.0)).status is BUSY
        assert renew(store, (key, "a", 30.0)) == [RenewOutcome.RENEWED]
        assert store.inspect(key).token == token

        assert store.release(ReleaseRequest(key, "a")) == (True, None)
        assert not store.inspect(key).token

    def test_keys_that_look_alike_are_different(self, store: Store) -> None:
        keys = ["a", "A", "a ", "a\0", "{a}", "%61", "a?b", "a\ud801b", "\ufffd", "x" * 9_999]
        keys += HOSTILE_KEYS.values()

        tokens = {key: take(store, key, f"o{n}") for n, key in enumerate(keys)}

        assert {key: store.inspect(key).token for key in keys} == tokens

    @parks
    @hostile_keys
    def test_a_run_can_be_parked_at_any_key(self, store: ParkingStore, key: str) -> None:
        take(store, key, "a")
        park(store, key, "run", b"envelope")

        wake = store.release(ReleaseRequest(key, "a")).wake
        assert wake is not None
        assert wake.envelope == b"envelope"
        store.mark_published(wake)
        store.mark_returned(wake)
        assert wait_until(lambda: swept(store), "a sweep") == [wake]
        store.drop(wake)
        assert not store.inspect(key).token

    @waits
    @hostile_keys
    def test_one_can_wait_for_any_key(self, store: Store, key: str) -> None:
        take(store, key, "a")
        waiter = wait_for(store, key, "b")

        store.release(ReleaseRequest(key, "a"))

        waiter.inbox.wait(PATIENCE)
        take(store, key, "b", queue=waiter.inbox)

    @hostile_runs
    def test_a_holders_run_may_have_any_name(self, store: Store, run: str) -> None:
        take(store, "k", "a", run=run)

        assert store.acquire(AcquireRequest("k", "b", 30.0)).holder_run == run
        assert store.inspect("k").run == run
        assert store.release(ReleaseRequest("k", "a", run=run)).released

    @parks
    @recognises
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
