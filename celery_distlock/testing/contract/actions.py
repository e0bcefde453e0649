"""What the tests do with a store, and the values that they try."""

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar, cast

import pytest

from celery_distlock.stores import AcquireRequest, ReleaseRequest, StandRequest
from celery_distlock.stores.base import Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.identities import new_owner
from celery_distlock.stores.listing import ListingStore
from celery_distlock.stores.parking import NotOursError, ParkingStore, UnsendableError
from celery_distlock.stores.values import (
    Ability,
    Completion,
    Ownership,
    ParkRequest,
    RenewOutcome,
    Reply,
    Route,
    Status,
    Want,
    WokenTask,
)

from .given import Given

T = TypeVar("T")
Test = TypeVar("Test", bound=Callable[..., None])

GRANTED, BUSY, PARKED, DONE = Status.GRANTED, Status.BUSY, Status.PARKED, Status.DONE
RESERVED = Status.RESERVED
YES, AGAIN = Completion.YES, Completion.YES_AND_MAY_COME_AGAIN
SHARED = Want(1, 0)  # beside any number

PATIENCE = 30.0  # seconds until what is waited for must have happened, on a busy machine too

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
ENVELOPES = [
    b"",
    b"\x00",
    bytes(range(256)),
    b'{"task": "t"}\r\n$5\r\n',
    b"\xff\xfe not utf-8",
    pytest.param(bytes(range(256)) * 4096, id="1MB"),
]
RUNS = ["a:b", "p:x", "b:x y", " ", "{}", "run\n2", "ü", "%"]

hostile_keys = pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=list(HOSTILE_KEYS))
hostile_runs = pytest.mark.parametrize("run", RUNS)
any_envelope = pytest.mark.parametrize("envelope", ENVELOPES)


def needs(reason: str, met: Callable[[Given, Store], bool]) -> Callable[[Test], Test]:
    """Skip a test where the store is not *met*; in one place, so that a summary can count them."""

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(self: Given, store: Store, **others: Any) -> None:
            if not met(self, store):
                pytest.skip(reason)
            test(self, store=store, **others)

        return cast("Test", run)

    return decorate


def needs_ability(ability: Ability) -> Callable[[Test], Test]:
    """Skip a test where the store lacks *ability*."""
    return needs(f"the store cannot {ability.value}", lambda _, store: ability in store.abilities)


waits = needs_ability(Ability.WAIT)
parks = needs_ability(Ability.PARK)
recognises = needs_ability(Ability.RECOGNISE)
shares = needs_ability(Ability.SHARE)
lists = needs_ability(Ability.LIST)
counts = needs_ability(Ability.COUNT)
several = needs_ability(Ability.SEVERAL)
weighs = needs_ability(Ability.WEIGH)
rates = needs_ability(Ability.RATE)
fair = needs("the store serves whoever asks first (fair = False)", lambda given, _: given.fair)
records = needs(
    "the store keeps no record of what operators do", lambda _, store: store.records_actions
)
loose = needs("an owner is one process's here (bound = True)", lambda given, _: not given.bound)
bound = needs("an owner is no process's here (bound = False)", lambda given, _: given.bound)


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
    """Acquire a key that has to be granted; return the token."""
    reply = store.acquire(AcquireRequest(key, owner, lease, **more))
    assert reply.status is GRANTED
    return reply.token


def ask(store: Store, key: str, owner: str, lease: float = 30.0, **more: Any) -> Reply:
    """Ask for a key that may be taken."""
    return store.acquire(AcquireRequest(key, owner, lease, **more))


def enter(store: Store, key: str, owners: str, want: Want = SHARED, lease: float = 30.0) -> int:
    """Have several take a key beside each other, a letter each; return the token of all."""
    tokens = {take(store, key, owner, lease, want=want) for owner in owners}
    assert len(tokens) == 1
    return tokens.pop()


def leave(store: Store, key: str, owner: str, **more: Any) -> list[WokenTask]:
    """Release a key that is one's own; return all whom that wakes."""
    released, wake = store.release(ReleaseRequest(key, owner, **more))
    assert released
    return all_of(wake)


def all_of(wake: WokenTask | None) -> list[WokenTask]:
    """Return those who were woken at once, one by one."""
    return [] if wake is None else [wake._replace(also=()), *wake.also]


def runs_of(wakes: Iterable[WokenTask]) -> list[str]:
    """Return which runs were woken."""
    return [wake.run for wake in wakes]


def wait_for(store: Store, key: str, name: str, lease: float = 30.0, **more: Any) -> Waiter:
    """Join the queue of a taken key as a blocked waiter."""
    waiter = Waiter(name, store.inbox(key, name))
    assert (
        store.acquire(AcquireRequest(key, name, lease, queue=waiter.inbox, **more)).status is BUSY
    )
    return waiter


def park(store: Store, key: str, run: str, envelope: bytes | None = None, **more: Any) -> None:
    """Park a run at a taken key; it was delivered to an owner that is over by now."""
    park_request = ParkRequest(run.encode() if envelope is None else envelope, task="shop.reserve")
    owner = new_owner("delivery")
    assert (
        store.acquire(AcquireRequest(key, owner, 30.0, queue=park_request, run=run, **more)).status
        is PARKED
    )


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
    Take a key for *lease* seconds, and have somebody *join* its queue meanwhile; return what does.

    Anew and for longer, if it was free again before: a busy machine may take that long.
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
    """Return all the keys that are found."""
    return [key for batch in store.find_keys(pattern) for key in batch]


def renew(store: Store, *holds: tuple[str, str, float]) -> list[RenewOutcome]:
    """Renew holds, each a key, an owner and a lease; return the outcomes."""
    return [outcome for outcome, _ in store.renew([Ownership(*hold) for hold in holds], 10.0)]


def holder(store: Store, key: str) -> str:
    """Return who holds a key."""
    return store.inspect(key).owner


def expire(store: Store, key: str, owner: str = "a") -> None:
    """Wait until the lease of *owner*, who does not renew it, has ended."""
    wait_until(lambda: store.inspect(key).owner != owner, "the end of the lease")


def swept(store: ParkingStore) -> list[WokenTask]:
    """Return what a sweep finds; nothing if another one was a moment ago."""
    return list(store.sweep(0.01))


def woken(store: Store, key: str, run: str, envelope: bytes = b"envelope") -> WokenTask:
    """Park a run at a key that is taken, and give that up."""
    take(store, key, "a")
    park(store, key, run, envelope)
    wake = store.release(ReleaseRequest(key, "a")).wake
    assert wake is not None
    return wake


def refuse(_wake: WokenTask) -> None:
    """As a publisher whose process is not to send it."""
    raise NotOursError


def spoilt(_wake: WokenTask) -> None:
    """As a publisher that has found an envelope which nobody can send."""
    raise UnsendableError("no JSON")


def take_all(store: Store, keys: str, owners: str, **more: Any) -> list[int] | None:
    """Acquire several keys at once; return the tokens."""
    replies = store.acquire_all(list(keys), list(owners), 30.0, run="run", **more)
    return None if replies is None else [reply.token for reply in replies]


def take_all_or_skip(store: Store, keys: str, owners: str, **more: Any) -> list[int]:
    """Acquire several keys at once; skip the test if the store takes one at a time."""
    tokens = take_all(store, keys, owners, **more)
    if tokens is None:
        pytest.skip("the store takes one key at a time")
    return tokens


def stand(
    store: ParkingStore,
    keys: str,
    run: str = "run",
    *,
    arrival: int = 0,
    wants: tuple[Want, ...] = (),
    **more: Any,
) -> list[Reply]:
    """Have a run begin to stand at its keys, as far as it comes; return what it is told there."""
    route = Route(tuple(keys), "shop.move", wants)
    park_request: ParkRequest | None = ParkRequest(run.encode())
    replies = []
    for key in keys:
        request = StandRequest(key, run, route, arrival, park_request, **more)
        replies.append(store.stand(request))
        park_request, arrival = None, replies[-1].arrival
        if replies[-1].status is not RESERVED:
            break
    return replies


def goes_on(store: ParkingStore, wake: WokenTask | None) -> list[WokenTask]:
    """Let a run that has one more key go on; return what is to be sent."""
    assert wake is not None
    return list(store.ready(wake))


def unsettled(store: Store) -> None:
    """Let a run end whose result is not stored yet."""
    take(store, "k", "a", run="run")
    assert store.release(
        ReleaseRequest("k", "a", run="run", completion=Completion.UNSETTLED)
    ).released


def kept(store: Store, lease: float) -> WokenTask:
    """Let a run hold the key whose message nobody but the store has."""
    take(store, "k", "a")
    park(store, "k", "run", b"envelope")
    wake = store.release(ReleaseRequest("k", "a")).wake
    assert wake is not None
    take(store, "k", "b", lease, run="run", retain=True)
    return wake


def work(store: ParkingStore) -> None:
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
    store.mark_published(wake)
    take(store, "k", "c", run="run-c", retain=True)
    store.release(ReleaseRequest("k", "c", run="run-c", keep_for=("run-c", 30.0)))
    take(store, "k", "c2", run="run-c")
    wake = store.release(ReleaseRequest("k", "c2", run="run-c", completion=YES)).wake
    assert wake is not None
    store.mark_returned(wake)
    store.drop(wake)
    assert not store.inspect("k").token
