"""What works wherever the store is: a lock, waiters, a parked run, the sweep."""

from __future__ import annotations

import threading
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from celery_distlock import Lock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.values import Ownership, ParkRequest, RenewOutcome, Status
from celery_distlock.testing.contract.actions import join_before_the_end
from tests.contract.parts.actions import park
from tests.waiting import wait_until

if TYPE_CHECKING:
    from celery_distlock.stores.base import Store
    from celery_distlock.stores.values import WokenTask


def exclude(store: Store, key: str, *, threads: int = 4, times: int = 10) -> list[int]:
    """Count under the lock in several threads; return the tokens in the order of the grants."""
    tokens: list[int] = []
    inside = 0
    overlaps: list[int] = []

    def work() -> None:
        nonlocal inside
        for _ in range(times):
            with Lock(key, store=store) as lease:
                inside += 1
                overlaps.extend([inside] if inside > 1 else [])
                tokens.append(lease.token)
                inside -= 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert not overlaps
    assert len(tokens) == threads * times
    assert tokens == sorted(set(tokens))
    return tokens


def hand_over(store: Store, key: str) -> None:
    """Release a key that another thread waits for."""
    lock, got = Lock(key, store=store), threading.Event()
    lock.acquire()
    waiter = threading.Thread(target=take_once, args=[store, key, got])
    waiter.start()
    wait_until(lambda: store.inspect(key).waiting, what="the waiter to queue")
    lock.release()
    assert got.wait(60)
    waiter.join(60)


def take_once(store: Store, key: str, got: threading.Event) -> None:
    """Wait for a key, say that it is taken, and give it back."""
    with Lock(key, store=store):
        got.set()


def push(store: Store, key: str) -> None:
    """Park a run whose turn comes, and is pushed to the channel."""
    came: list[WokenTask] = []
    channel = store.channels.open_channel(came.append)
    assert channel is not None
    with closing(channel):
        store.acquire(AcquireRequest(key, "holder", 60.0))
        # A server that does not know of the channel yet gives the run to the releaser.
        wait_until(lambda: _pushed(store, key, channel.address, came), what="a run to be pushed")
        assert came[0].envelope == b"envelope"


def _pushed(store: Store, key: str, address: str, came: list[WokenTask]) -> bool:
    park_request = ParkRequest(b"envelope", address)
    store.acquire(AcquireRequest(key, "holder", 60.0))
    assert (
        store.acquire(AcquireRequest(key, "late", 60.0, queue=park_request, run="run")).status
        is Status.PARKED
    )
    released = store.release(ReleaseRequest(key, "holder"))
    if released.wake is None:
        wait_until(lambda: came, what="the push")
    store.acquire(AcquireRequest(key, "late", 60.0, run="run"))
    store.release(ReleaseRequest(key, "late", run="run"))
    return bool(came)


def park_and_sweep(store: Store, keys: list[str], lease: float = 0.3) -> set[str]:
    """Park a run at each of *keys*, whose holders vanish; return the runs that sweeps find."""
    for key in keys:
        join_before_the_end(
            store,
            lease,
            lambda key=key: park(store, key, f"run {key}", b"envelope"),
            key=key,
            owner=f"vanished {key}",
        )
    found: set[str] = set()

    def all_found() -> bool:
        with suppress(StoreUnavailableError):  # for a moment, while another becomes the master
            found.update(wake.run for wake in store.parking.sweep(0.05))
        return len(found) == len(keys)

    wait_until(all_found, what="all to be found by sweeps")
    return found


def renew(store: Store, keys: list[str]) -> set[RenewOutcome]:
    """Take and renew all of *keys* in one go."""
    holds = [Ownership(key, f"owner {key}", 60.0) for key in keys]
    for hold in holds:
        store.acquire(AcquireRequest(hold.key, hold.owner, 60.0))
    return {outcome for outcome, _ in store.renew(holds, 5.0)}


def run_all(store: Store) -> None:
    """All of these."""
    keys = [f"k{n}" for n in range(30)]  # in a cluster, on all nodes
    tokens: Any = exclude(store, "counted")
    assert tokens
    hand_over(store, "handed over")
    push(store, "pushed")
    assert park_and_sweep(store, keys) == {f"run {key}" for key in keys}
    assert renew(store, [f"renewed {key}" for key in keys]) == {RenewOutcome.RENEWED}
