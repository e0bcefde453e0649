"""A newly received message for a locked task: its arrival time, and the keys that it needs."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from celery.worker import state

from celery_distlock import clock
from celery_distlock.engine.hold import want_of
from celery_distlock.errors import StoreError
from celery_distlock.key import Key
from celery_distlock.keys import KeyRule, slot_name
from celery_distlock.policies import UNBOUNDED, Park
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import PLAIN_CONTENT, LockHeader
from celery_distlock.runtime.messages import seconds_until
from celery_distlock.runtime.plans import Plan
from celery_distlock.stores import Ability, Store
from celery_distlock.stores.identities import is_own
from celery_distlock.stores.values import KeyState, Want

__all__ = [
    "EXACT_FOR",
    "PATIENCE",
    "Arrival",
    "ArrivalTimes",
    "Delivery",
    "Receiver",
    "can_park",
    "keys_of",
    "look_at",
    "may_run_at_once",
    "wants_of",
]

logger = logging.getLogger(__name__)

PATIENCE = 1.0  # seconds that the lock store has for an answer; after that the pool must ask
EXACT_FOR = 60.0  # seconds after which the store's clock is read again, because clocks drift
LARGE_BODY = 64 * 1024  # bytes; the key of a larger message is made in the pool


class Delivery(NamedTuple):
    """Functions that hand a message to the pool, acknowledge it, and reject it."""

    go_on: Callable[..., Any]
    acknowledge: Callable[..., Any]
    reject: Callable[..., Any]


class Receiver:
    """Receives the messages for one locked task, and hands them to the pool."""

    def __init__(self, task: Any, plan: Plan, runtime: Runtime, consumer: Any) -> None:
        self._task = task
        self._plan = plan
        self._runtime = runtime
        self._consumer = consumer

    def receive(self, message: Any, delivery: Delivery) -> Any:
        """Hand *message* to the pool, at once or later, or acknowledge it."""
        header = LockHeader.of(message.headers)
        if not header.woken:
            return self._receive_new(message, delivery)
        answer = self._receive_woken(message, header, delivery)
        self._runtime.keep_fetched(message, header)
        return answer

    def _receive_new(self, message: Any, delivery: Delivery) -> Any:
        return delivery.go_on()

    def _receive_woken(self, message: Any, header: LockHeader, delivery: Delivery) -> Any:
        return delivery.go_on()


@dataclass
class Arrival:
    """
    A message whose keys a thread must park or check before the pool may have it.

    Attributes:
        keys: In the order in which they are acquired.
        acknowledge: Acknowledges the message to the broker.
        go_on: Hands the message to the pool.
        came_at: When it was received, by the local clock.
        stamp: The same by the store's clock, see `ArrivalTimes`.
        widens: Whether the prefetch is raised by one while this message is held.
        came_first: Whether it was parked at a key that is open to it, so that no release wakes it.
        look: A call that the thread makes instead of parking it.
        bounds: How many may wait for its key, for it to be parked, and for how long it may.
    """

    task: Any
    message: Any
    keys: tuple[Key, ...]
    acknowledge: Callable[[], object]
    go_on: Callable[[], object]
    came_at: float = field(default_factory=clock.monotonic)
    stamp: int = 0
    widens: bool = False
    came_first: bool = False
    look: Callable[[], object] | None = None
    bounds: Park = UNBOUNDED

    @property
    def identity(self) -> str:
        """The task's id."""
        return str(self.message.headers["id"])

    @property
    def key(self) -> str:
        """The first key."""
        return self.keys[0].template

    @property
    def has_waited(self) -> bool:
        """Whether it has left the queue already, and its policy applies if it must wait again."""
        since, timeout = LockHeader.of(self.message.headers).since, self.bounds.timeout
        return bool(since and timeout is not None and clock.wall() - since >= timeout)

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The keys' slot names."""
        return tuple(self.wants)

    @functools.cached_property
    def wants(self) -> dict[str, Want]:
        """Its request for each key, by slot name."""
        return wants_of(self.keys)


def can_park(runtime: Runtime) -> bool:
    """Whether there are locked tasks and a store that can park."""
    wanted = runtime.settings.enabled and any(runtime.plans.values())
    return wanted and Ability.QUEUE in runtime.store.abilities


def keys_of(message: Any, rule: KeyRule) -> tuple[Key, ...]:
    """Return the keys of *message* in the order in which they are acquired; none: ask the pool."""
    if len(message.body) > LARGE_BODY or message.content_type not in PLAIN_CONTENT:
        return ()
    try:
        args, kwargs, _ = message.payload
        keys = rule.keys(args, kwargs)
        return keys if len(keys) == 1 else tuple(sorted(keys, key=attrgetter("template")))
    except Exception:  # noqa: BLE001  # the task fails with the same error in the pool
        return ()


def wants_of(keys: Iterable[Key]) -> dict[str, Want]:
    """Return the request for each of *keys*, by slot name."""
    return {slot_name(key.template): want_of(key) for key in keys}


def look_at(store: Store, key: Key, want: Want, run: str) -> tuple[KeyState, bool]:
    """
    Return the state of a key, and whether *run* could acquire it; waits at most `PATIENCE` seconds.

    That is also true while the previous attempt holds the key, which keeps it for this one.
    """
    now, admits = store.inspect_for(key.template, want, PATIENCE)
    return now, admits or any(is_own(each, run) for each in now.runs)


def may_run_at_once(message: Any) -> bool:
    """Whether *message* is a first delivery that only its key could delay."""
    headers = message.headers
    return not (
        headers.get("eta")
        or _has_expired(headers.get("expires"))
        or headers.get("stamps")
        or (message.delivery_info or {}).get("redelivered")
        or headers["id"] in state.revoked
    )


def _has_expired(expires: Any) -> bool:
    try:
        return bool(expires) and not seconds_until(expires)
    except (TypeError, ValueError, OverflowError):
        return True  # Celery reports what is wrong with it


class ArrivalTimes:
    """
    Stamp messages as they are received, by the lock store's clock, in µs.

    A stamp goes with each request for a key. So a task with a late request, because it waited for a
    slot of the pool, is queued before tasks that were received after it.

    - Each stamp of a worker is later than the one before.
    - A stamp lags behind the store's clock by the time that the store's answer took, so those of
      two workers differ by a round trip at most.
    - It is 0 while the store has not answered; the task then counts as arrived at its request.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: int | None = None  # µs by which the store's clock is ahead of the local one
        self._last = 0
        self._read_at = 0.0

    @property
    def inexact(self) -> bool:
        """Whether the store's clock was not read within the last `EXACT_FOR` seconds."""
        return self._ahead is None or clock.monotonic() > self._read_at + EXACT_FOR

    def stamp(self) -> int:
        """Return the time by the store's clock, increased to be unique; 0 if it is not known."""
        if self._ahead is None:
            return 0
        self._last = max(self._last + 1, _microseconds() + self._ahead)
        return self._last

    def read_clock(self, patience: float) -> None:
        """Read the store's clock within *patience* seconds; keep the last reading on an error."""
        self._read_at = clock.monotonic()
        try:
            now = self._store.time(patience)
        except StoreError as error:
            logger.debug(
                "the lock store's clock was not read; arrival times go by the last reading: %s",
                error,
            )
            return
        if now:
            self._ahead = now - _microseconds()


def _microseconds() -> int:
    return round(clock.monotonic() * 1e6)
