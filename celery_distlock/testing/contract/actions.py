"""Actions of the tests on a store, and the values that they use."""

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.values import (
    Completion,
    Ownership,
    RenewOutcome,
    Reply,
    Status,
    Want,
    WokenTask,
)

T = TypeVar("T")

GRANTED, BUSY, DONE = Status.GRANTED, Status.BUSY, Status.DONE
YES, AGAIN = Completion.YES, Completion.YES_AND_MAY_COME_AGAIN
SHARED = Want(1, 0)  # with any number of other holders
TWO, THREE = Want(1, 2), Want(1, 3)

RESTS = "resting:1"  # a run that never claims its key

PATIENCE = 30.0  # seconds within which an expected event must happen, even on a busy machine

HOSTILE_KEYS = {
    "braces": "{a}{b}}{",
    "percent": "%7B%25%",
    "blanks": " a\tb\r\nc ",
    "nul": "a\0b",
    "glob": "*?[a]\\",
    "slashes": "/a//../b/.",
    "unicode": "größe \U0001f512 \u2028",
    "surrogate": "a\ud800b",
    "long": "x" * 10_000,
    "quotes": "'\"; return 1 --",
}
RUNS = ["a:b", "p:x", "b:x y", " ", "{}", "run\n2", "ü", "%"]

hostile_keys = pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))
hostile_runs = pytest.mark.parametrize("run", RUNS)


def wait_until(predicate: Callable[[], T], what: str) -> T:
    """Call *predicate* until it returns something true, and return that."""
    deadline = time.monotonic() + PATIENCE
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s for {what}"
        time.sleep(0.005)
    return value


class Waiter(NamedTuple):
    """A blocked waiter in the queue of a key."""

    owner: str
    inbox: Inbox


def take(store: Store, key: str, owner: str, lease: float = 30.0, **more: Any) -> int:
    """Acquire a key, which must be granted; return the token."""
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))
    assert reply.status is GRANTED
    return reply.token


def ask(store: Store, key: str, owner: str, lease: float = 30.0, **more: Any) -> Reply:
    """Request a key, which may be held; return the reply."""
    return store.acquire(AcquireRequest(key, owner, lease, **more))


def enter(store: Store, key: str, owners: str, want: Want = SHARED, lease: float = 30.0) -> int:
    """Let several owners, one letter each, share a key; return their token."""
    tokens = {take(store, key, owner, lease, want=want) for owner in owners}
    assert len(tokens) == 1
    return tokens.pop()


def leave(store: Store, key: str, owner: str, **more: Any) -> list[WokenTask]:
    """Release a key that *owner* must hold; return the runs that this wakes."""
    released, wake = store.release(ReleaseRequest(key, owner, **more))
    assert released
    return all_of(wake)


def all_of(wake: WokenTask | None) -> list[WokenTask]:
    """Return *wake* and the runs woken with it as a flat list."""
    return [] if wake is None else [wake._replace(also=()), *wake.also]


def runs_of(wakes: Iterable[WokenTask]) -> list[str]:
    """Return the ids of the woken runs."""
    return [wake.run for wake in wakes]


def wait_for(store: Store, key: str, name: str, lease: float = 30.0, **more: Any) -> Waiter:
    """Join the queue of a held key as a blocked waiter."""
    waiter = Waiter(name, store.inbox(key, name))
    assert (
        store.acquire(AcquireRequest(key, name, lease, queue=waiter.inbox, **more)).status is BUSY
    )
    return waiter


def grantees(store: Store, waiters: list[Waiter], *, hands_over: bool) -> list[str]:
    """Let waiters request the key ``k``, the last one first; return the owners that get it."""
    before = holder(store, "k")
    got = [
        waiter.owner
        for waiter in reversed(waiters)
        if ask(store, "k", waiter.owner, queue=waiter.inbox).status is GRANTED
    ]
    assert got == [before] or not hands_over
    return got


def join_before_the_end(
    store: Store,
    lease: float,
    join: Callable[[], T],
    *,
    key: str = "k",
    owner: str = "a",
    run: str = "",
) -> T:
    """
    Take a key for *lease* seconds, call *join* while it is held, and return the result.

    If the lease ended before, as may happen on a busy machine, try again with a longer one.
    """
    while True:
        take(store, key, owner, lease, run=run)
        try:
            return join()
        except AssertionError:
            newcomer = holder(store, key)
            if newcomer in {"", owner} or lease > PATIENCE:
                raise
            store.release(ReleaseRequest(key, newcomer))
            lease *= 4


def found_keys(store: ListingStore, pattern: str = "*") -> list[str]:
    """Return all keys that :meth:`ListingStore.find_keys` yields."""
    return [key for batch in store.find_keys(pattern) for key in batch]


def renew(store: Store, *holds: tuple[str, str, float]) -> list[RenewOutcome]:
    """Renew holds, each a key, an owner and a lease; return the outcomes."""
    return [outcome for outcome, _ in store.renew([Ownership(*hold) for hold in holds], 10.0)]


def holder(store: Store, key: str) -> str:
    """Return the owner that holds a key."""
    return store.inspect(key).owner


def expire(store: Store, key: str, owner: str = "a") -> None:
    """Wait until the lease of *owner*, which is not renewed, has ended."""
    wait_until(lambda: store.inspect(key).owner != owner, "the end of the lease")


def take_all(store: Store, keys: str, owners: str, **more: Any) -> list[int] | None:
    """Acquire several keys at once; return the tokens."""
    replies = store.acquire_all(list(keys), list(owners), 30.0, run="run", **more)
    return None if replies is None else [reply.token for reply in replies]


def unsettled(store: Store) -> None:
    """End a run whose result is not stored yet."""
    take(store, "k", "a", run="run")
    assert store.release(
        ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED)
    ).released
