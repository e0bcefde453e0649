"""What the tests of our own stores do with them, and the messages that they try."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest, queue_store
from celery_distlock.stores.base import Store
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.queue_store import NotOursError, QueueStore, UnsendableError, ready
from celery_distlock.stores.values import ParkRequest, Reply, Route, Status, Want, WokenTask
from celery_distlock.testing.contract.actions import AGAIN, YES, take, take_all, wait_for

PARKED, RESERVED = Status.PARKED, Status.RESERVED

ENVELOPES = [
    b"",
    b"\x00",
    bytes(range(256)),
    b'{"task": "t"}\r\n$5\r\n',
    b"\xff\xfe not utf-8",
    pytest.param(bytes(range(256)) * 4096, id="1MB"),
]

any_envelope = pytest.mark.parametrize("envelope", ENVELOPES)


def park(store: Store, key: str, run: str, envelope: bytes | None = None, **more: Any) -> None:
    """Park a run at a taken key; it was delivered to an owner that is over by now."""
    park_request = ParkRequest(run.encode() if envelope is None else envelope, task="shop.reserve")
    owner = new_owner("delivery")
    assert (
        store.acquire(AcquireRequest(key, owner, 30.0, queue=park_request, run=run, **more)).status
        is PARKED
    )


def swept(store: QueueStore) -> list[WokenTask]:
    """Return what a sweep finds; nothing if another one was a moment ago."""
    return list(store.parking.sweep(0.01))


def woken(store: Store, key: str, run: str, envelope: bytes = b"envelope") -> WokenTask:
    """Park a run at a key that is taken, and give that up."""
    take(store, key, "a")
    park(store, key, run, envelope)
    wake = store.release(ReleaseRequest(key, "a")).wake
    assert wake is not None
    return wake


def refuse(_wake: WokenTask) -> None:
    """Refuse a run, as a publisher of an app that does not send it."""
    raise NotOursError


def spoilt(_wake: WokenTask) -> None:
    """Fail, as a publisher that finds an envelope spoilt."""
    raise UnsendableError("no JSON")


def take_together(store: Store, keys: str, owners: str, **more: Any) -> list[int]:
    """Acquire several keys that must be granted at once; return the tokens."""
    tokens = take_all(store, keys, owners, **more)
    assert tokens is not None
    return tokens


def reserve_or_queue(
    store: QueueStore,
    keys: Sequence[str],
    run: str = "run",
    *,
    arrival: int = 0,
    wants: tuple[Want, ...] = (),
    **more: Any,
) -> Reply:
    """Have a run take all of its keys, or wait for them."""
    route = Route(tuple(keys), "shop.move", wants)
    return queue_store.reserve_or_queue(
        store, StandRequest(run, route, arrival, ParkRequest(run.encode()), **more)
    )


def goes_on(store: QueueStore, wake: WokenTask | None) -> list[WokenTask]:
    """Let a run that has one more key go on; return what must be sent."""
    assert wake is not None
    return list(ready(store, wake))


def kept(store: Store, lease: float) -> WokenTask:
    """Let a run hold the key while its only message is in the store."""
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release(ReleaseRequest("k", "a")).wake
    assert wake is not None
    take(store, "k", "b", lease, run="run", retain=True)
    return wake


def work(store: QueueStore) -> None:
    """Let everything happen at the key "k" that can, to its end."""
    take(store, "k", "a", run="run-a")
    gone = wait_for(store, "k", "gone")
    waiter = wait_for(store, "k", "b")
    park(store, "k", "run-c")
    park(store, "k", "run-d")
    park(store, "k", "run-a", redelivered=True)
    store.release(ReleaseRequest("k", "gone", inbox=gone.inbox))
    store.release(ReleaseRequest("k", "a", run="run-a", completion=AGAIN))
    take(store, "k", "b", queue=waiter.inbox)
    wake = store.release(ReleaseRequest("k", "b")).wake
    assert wake is not None
    store.parking.mark_published(wake)
    take(store, "k", "c", run="run-c", retain=True)
    store.release(ReleaseRequest("k", "c", run="run-c", keep_for=("run-c", 30.0)))
    take(store, "k", "c2", run="run-c")
    wake = store.release(ReleaseRequest("k", "c2", run="run-c", completion=YES)).wake
    assert wake is not None
    store.parking.mark_returned(wake)
    store.drop(wake)
    assert not store.inspect("k").token
