"""The interface of lock stores, and the contract that each of them keeps."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar, Protocol, Self, TypeVar
from weakref import WeakSet

from celery_distlock.errors import StoreError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ForkStage, at_fork

from .channels import Inbox, PollingInbox
from .findings import Finding
from .requests import AcquireRequest, ReleaseRequest
from .values import (
    Ability,
    KeyState,
    Ownership,
    Release,
    RenewOutcome,
    Reply,
    Sending,
    Status,
    Want,
    WokenTask,
)

__all__ = [
    "Complaints",
    "Store",
    "batches",
    "forget_after_fork",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Complaints:
    """Logs each complaint about a record once, as far as it remembers them."""

    REMEMBERED = 1000

    def __init__(self) -> None:
        self._logged: set[Hashable] = set()

    def report(self, about: Hashable, words: str, *facts: object) -> None:
        """Log *words* as an error, unless something was logged about *about* before."""
        if about not in self._logged:
            if len(self._logged) >= self.REMEMBERED:
                self._logged.clear()
            self._logged.add(about)
            logger.error(words, *facts)


class Store(ABC):
    """
    A place that keeps locks.

    Every store implements six methods. The defaults of the others suit a store that has nothing
    better. Three abilities have an interface each: :class:`~celery_distlock.stores.ListingStore`,
    :class:`~celery_distlock.stores.CountingStore` and
    :class:`~celery_distlock.stores.QueueStore`. `abilities` lists the abilities of a store;
    :meth:`of` returns a store as one with the interface.

    Every request may be repeated: an owner names one acquisition, not a process, so a request
    whose answer was lost is simply sent again. Every method raises
    :exc:`~celery_distlock.errors.StoreUnavailableError` when the outcome is unknown, and
    :exc:`~celery_distlock.errors.StoreError` when the store refuses.

    Attributes:
        abilities: What the store can do. A class lists those of ``SHARE``, ``RECOGNISE``,
            ``SEVERAL`` and ``RECALL`` that it has; those of its interfaces are added.
        address: Where the store is, for people: without a password, the same for all prefixes.
        identity: Equal for stores in which a key is the same lock.
    """

    _ability: ClassVar[Ability | None] = None  # the one that an interface provides
    abilities: ClassVar[frozenset[Ability]] = frozenset()
    address: str
    identity: str

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        named = (base._ability for base in cls.__mro__ if issubclass(base, Store))
        cls.abilities = cls.abilities.union(filter(None, named))

    @classmethod
    def of(cls, store: "Store") -> Self:
        """
        Return *store* as one that has this interface.

        Raises:
            StoreError: The store lacks the ability.
        """
        assert cls._ability is not None
        if cls._ability not in store.abilities:
            raise StoreError(f"{store.address} cannot {cls._ability.value}")
        assert isinstance(store, cls)
        return store

    @abstractmethod
    def acquire(self, request: AcquireRequest) -> Reply:
        """
        Take the key for the request's lease, join its queue, or learn its holder, in one step.

        The key goes to the first waiter in the queue. A caller that does not queue does not
        overtake. While the first waiter is dispatched, a caller that arrived before it gets the
        key.
        """

    def check_want(self, key: str, want: Want) -> None:
        """
        Raise :exc:`~celery_distlock.errors.StoreError` if this store cannot grant such a *want*.

        `acquire` must begin with it. Otherwise a store that ignores a part of *want* would grant
        something else.
        """
        needed = want.needs
        if needed is not None and needed not in self.abilities:
            less = "one unit of it" if Ability.SEVERAL in self.abilities else "it exclusively"
            less = "it without a rate" if want.rates else less
            where = "one Redis" if needed is Ability.QUEUE else "one Redis or in ZooKeeper"
            raise StoreError(
                f"{self.address} cannot {needed.value}: {shown(key)!r} was asked for with {want};"
                f" ask for {less}, or keep its locks in {where}"
            )

    def acquire_all(
        self,
        keys: Sequence[str],
        owners: Sequence[str],
        lease: float,
        *,
        run: str = "",
        redelivered: bool = False,
        retain: bool = False,
        wants: Sequence[Want] = (),
    ) -> list[Reply] | None:
        """
        Take all the *keys*, each for its owner, if they are free and have no waiters; else none.

        *wants* is how much of each; empty: all keys exclusively. A key counts as free if the
        request fits alongside its holders.

        If the run's message may have been delivered before, the keys are taken only if all of them
        are reserved for the run and the store does not know of its end. None: not all of them were
        available, or this store cannot take several in one step; nothing was taken. *run*,
        *redelivered* and *retain* as in `AcquireRequest`.
        """
        return None

    def retry_delay(
        self, key: str, usual: float, within: tuple[float, float], timeout: float
    ) -> float | None:
        """
        Suggest a retry delay for a caller that found *key* held and does not queue.

        Spreads the callers over the expected holds. The delay reserves nothing and excludes no
        other caller. One attempt of *timeout* seconds.

        Args:
            key: The key.
            usual: Seconds for which such a task has held its key recently; 0: unknown.
            within: The shortest delay if the holder has had the key for longer than usual, and the
                longest delay.

        Returns:
            Seconds; infinity if they exceed the longest delay. None if this store has no estimate.
        """
        return None

    def time(self, timeout: float) -> int:
        """
        Return the time on the clock that arrivals refer to, in microseconds; 0 if there is none.

        One attempt of *timeout* seconds. Every server of a cluster has its own clock; this is the
        clock of one of them.
        """
        return 0

    @abstractmethod
    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        """
        Extend the lease of every hold; never re-create a lock.

        Does not raise and does not repeat: a hold that got no answer within *timeout* seconds is
        ``UNKNOWN``. Each outcome comes with the local time just before the request.
        """

    def recall(self, key: str, owner: str) -> bool:
        """
        Ask *owner*, which holds *key*, to leave: its renewals are ``RECALLED`` from now on.

        Returns:
            Whether it holds the key.

        Raises:
            StoreError: This store cannot do it, or did not answer.
        """
        raise StoreError(f"{self.address} cannot {Ability.RECALL.value}")

    @abstractmethod
    def release(self, request: ReleaseRequest) -> Release:
        """Release the key, or leave its queue; the first waiter gets the key."""

    def subscribed(self, key: str) -> bool:
        """Whether an inbox for *key* costs nothing now, so that the first request may queue."""
        return False

    def inbox(self, key: str, owner: str) -> Inbox:
        """Return an inbox in which *owner* can wait for *key*; it listens already."""
        return PollingInbox(owner)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        """
        Remove a dispatched or unsettled run: it will not execute, or its end is now final.

        Its key goes to the next waiter. If *mark*, a later second delivery is recognised.
        """
        return Release(False)

    @abstractmethod
    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        """Return a snapshot of a key; with a *timeout* in seconds, in one attempt."""

    def inspect_for(
        self, key: str, want: Want, timeout: float | None = None
    ) -> tuple[KeyState, bool]:
        """
        Inspect a key; return also whether a request for *want* would be granted now.

        This default suits stores that count neither units nor starts.
        """
        now = self.inspect(key, timeout)
        fits = not want.capacity or now.used < want.capacity
        shares = bool(now.holders) and not (want.alone or now.waiting) and fits
        return now, shares or not (now.token or now.rest)

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        """Inspect several keys, in as few requests as possible."""
        return [self.inspect(key) for key in keys]

    def describe(self) -> Iterator[Finding]:
        """Describe the servers: version, memory, clock, ...; report problems as doubts."""
        yield from ()

    @abstractmethod
    def check(self) -> list[Finding]:
        """Return the doubts about keeping locks here; raise `StoreError` if it cannot serve."""

    def _try_lock(self, key: str, lease: float = 1.0) -> None:
        """Acquire and release *key*, for `check`; raise `StoreError` if it is not granted."""
        reply = self.acquire(AcquireRequest(key, "probe", lease))
        self.release(ReleaseRequest(key, "probe"))
        if reply.status is not Status.GRANTED:
            raise StoreError(f"{self.address}: the test lock was not granted but {reply.status}")

    def dispatch(
        self,
        wake: WokenTask | None,
        *,
        on_sent: Callable[[WokenTask], object] | None = None,
        patience: float | None = None,
    ) -> Sending:
        """
        Send the runs that a release woke, if this is a store that queues; return the outcome.

        See :class:`~celery_distlock.stores.QueueStore`.
        """
        return Sending.LEFT

    @abstractmethod
    def close(self) -> None:
        """Close all connections. A store that is used again opens new ones."""


def _forget_connections() -> None:
    for store in list(_connected):
        store.forget_connections()


class Connected(Protocol):
    """An object with connections that a forked child must not use."""

    def forget_connections(self) -> None:
        """Drop the connections inherited by a fork; send nothing, for they are the parent's."""


def forget_after_fork(store: Connected) -> None:
    """Make *store* forget its connections in each child that this process forks."""
    _connected.add(store)


def batches(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield *things* in slices of *size*; the last one may be smaller."""
    for first in range(0, len(things), size):
        yield things[first : first + size]


_connected: WeakSet[Connected] = WeakSet()
at_fork(_forget_connections, ForkStage.CONNECTIONS)
