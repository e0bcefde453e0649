"""What a lock store is: the contract that every one keeps."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar, Protocol, Self, TypeVar
from weakref import WeakSet

from celery_distlock.errors import StoreError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ForkStage, begin_anew

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
    """What is wrong with records: said once of each, as far as that is remembered."""

    REMEMBERED = 1000

    def __init__(self) -> None:
        self._told: set[Hashable] = set()

    def tell(self, about: Hashable, words: str, *facts: object) -> None:
        """Log *words* as an error, if that was not done of *about*."""
        if about not in self._told:
            if len(self._told) >= self.REMEMBERED:
                self._told.clear()
            self._told.add(about)
            logger.error(words, *facts)


class Store(ABC):
    """
    A place that keeps locks.

    Six methods are what every store has; the defaults of the others are right for a store that
    does not know better. Three abilities have an interface each:
    :class:`~celery_distlock.stores.ListingStore`, :class:`~celery_distlock.stores.CountingStore`
    and :class:`~celery_distlock.stores.QueueStore`. Whether a store has an ability, its `abilities`
    say; :meth:`of` returns it as one with the interface.

    Every request may be repeated: an owner names one acquisition, not a process, so a request
    whose answer was lost is simply sent again. Every method raises
    :exc:`~celery_distlock.errors.StoreUnavailableError` when the outcome is unknown, and
    :exc:`~celery_distlock.errors.StoreError` when the store refuses.

    Attributes:
        abilities: What it can do. A class names those of ``SHARE``, ``RECOGNISE`` and ``SEVERAL``
            that it has; those of its interfaces are added.
        address: Where the store is, without a password: for people, and the same for all prefixes.
        identity: Equal for stores in which a key is the same lock.
    """

    _ability: ClassVar[Ability | None] = None  # that an interface stands for
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
            StoreError: It lacks the ability.
        """
        assert cls._ability is not None
        if cls._ability not in store.abilities:
            raise StoreError(f"{store.address} cannot {cls._ability.value}")
        assert isinstance(store, cls)
        return store

    @abstractmethod
    def acquire(self, request: AcquireRequest) -> Reply:
        """
        Take the key for the request's lease, join its queue, or learn who holds it: in one step.

        The key goes to the first in the queue; one who does not queue does not overtake. While the
        first is on its way, one who is here and came before it has the key.
        """

    def check_want(self, key: str, want: Want) -> None:
        """
        Raise :exc:`~celery_distlock.errors.StoreError` if this store cannot grant such a *want*.

        `acquire` begins with it: what is not looked at would be granted as something else.
        """
        needed = want.needs
        if needed is not None and needed not in self.abilities:
            less = "one unit of it" if Ability.SEVERAL in self.abilities else "it alone"
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
        Take all the *keys*, each for its owner, if they are free and nobody waits; else none.

        *wants* says how much of each; if it is empty, all of all. What fits beside its holders
        counts as free.

        If the run's message may have been delivered before: if all of them are kept for it, and the
        store knows nothing of its end. None: not all of them can be had, or this store cannot take
        several in one step; nothing was taken then. The last three as in `AcquireRequest`.
        """
        return None

    def retry_delay(
        self, key: str, usual: float, within: tuple[float, float], timeout: float
    ) -> float | None:
        """
        Say when one who found *key* taken, and does not queue, is to come again.

        Spreads those who come over the holds to be expected; promises nothing, and keeps nobody
        out. One attempt of *timeout* seconds.

        Args:
            key: The key.
            usual: Seconds that such a task had its key of late; 0: it is not known.
            within: Seconds for which a holder is left alone who has had the key for longer than
                usual; and the seconds that are too many.

        Returns:
            Seconds; infinity if they are too many. None if this store cannot tell.
        """
        return None

    def time(self, timeout: float) -> int:
        """
        Return the time that arrivals are told by, in microseconds; 0 if there is none.

        One attempt of *timeout* seconds. Every server of a cluster has a clock of its own: this
        is one's.
        """
        return 0

    @abstractmethod
    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        """
        Push the end of every hold's lease; never make a lock anew.

        Does not raise and does not repeat: a hold that got no answer within *timeout* seconds is
        ``UNKNOWN``. Each outcome comes with the local clock before it was asked for.
        """

    @abstractmethod
    def release(self, request: ReleaseRequest) -> Release:
        """Release the key, or leave its queue; the first waiter has it then."""

    def subscribed(self, key: str) -> bool:
        """Whether an inbox for *key* costs nothing now: one may queue with the first request."""
        return False

    def inbox(self, key: str, owner: str) -> Inbox:
        """Return where *owner* can wait for *key*, listening already."""
        return PollingInbox(owner)

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        """
        Forget a run that is on its way or unsettled: it will not run, or has ended for all.

        Its key goes to the next. If *mark*, a second delivery that comes later is recognised.
        """
        return Release(False)

    @abstractmethod
    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        """Look at a key without changing it; if *timeout* seconds are given, in one attempt."""

    def inspect_for(
        self, key: str, want: Want, timeout: float | None = None
    ) -> tuple[KeyState, bool]:
        """
        Inspect a key, and tell whether a request of *want* that comes now is granted.

        What is written here is for stores that count neither units nor starts.
        """
        now = self.inspect(key, timeout)
        fits = not want.capacity or now.used < want.capacity
        shares = bool(now.holders) and not (want.alone or now.waiting) and fits
        return now, shares or not (now.token or now.rest)

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        """Inspect several keys; in as few requests as can be."""
        return [self.inspect(key) for key in keys]

    def describe(self) -> Iterator[Finding]:
        """Describe the servers: version, memory, clock, ...; what is wrong there is a doubt."""
        yield from ()

    @abstractmethod
    def check(self) -> list[Finding]:
        """Return what speaks against keeping locks here; raise `StoreError` if it cannot serve."""

    def dispatch(
        self,
        wake: WokenTask | None,
        *,
        on_sent: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> Sending:
        """Send what a release woke; see :meth:`celery_distlock.stores.QueueStore.dispatch`."""
        return Sending.LEFT

    @abstractmethod
    def close(self) -> None:
        """Give all connections back. The store may be used again, and opens new ones then."""


def _forget_connections() -> None:
    for store in list(_connected):
        store.forget_connections()


class Connected(Protocol):
    """What has connections that a forked child must not use."""

    def forget_connections(self) -> None:
        """Drop what a fork inherited, without a word to the server: it is the parent's."""


def forget_after_fork(store: Connected) -> None:
    """Have *store* forget its connections in each child that this process forks."""
    _connected.add(store)


def batches(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Return *things* in parts of *size*, the last one smaller."""
    for first in range(0, len(things), size):
        yield things[first : first + size]


_connected: WeakSet[Connected] = WeakSet()
begin_anew(_forget_connections, ForkStage.CONNECTIONS)
