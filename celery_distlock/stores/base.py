"""What a lock store is: the contract that every one keeps, and the words that it answers with."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import Outcome, dispatch
from celery_distlock.process.forks import ForkStage, begin_anew

from .channels import DeliveryChannel, Inbox, PollingInbox
from .findings import Finding
from .identities import task_id_of
from .requests import AcquireRequest, ReleaseRequest
from .values import (
    Ability,
    KeyState,
    Ownership,
    ParkRequest,
    PeerChannel,
    Release,
    RenewOutcome,
    Reply,
    Route,
    Sending,
    Status,
    Waiter,
    WokenTask,
)

__all__ = [
    "Complaints",
    "NotOursError",
    "Publisher",
    "Store",
    "UnsendableError",
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


class NotOursError(Exception):
    """A publisher is not to send a woken run: it is for another one, of this process or others."""

    def report(self) -> None:
        """Log why; called where no publisher of this process sends the run."""


class UnsendableError(Exception):
    """No publisher can send a woken run, whatever the broker's state: its envelope is spoilt."""


Publisher: TypeAlias = Callable[[WokenTask], bool | None]


class Store(ABC):
    """
    A place that keeps locks.

    Six methods are what every store has; the others go with its `abilities`, and a store that lacks
    those leaves them as they are.

    Every request may be repeated: an owner names one acquisition, not a process, so a request
    whose answer was lost is simply sent again. Every method raises
    :exc:`~celery_distlock.errors.StoreUnavailableError` when the outcome is unknown, and
    :exc:`~celery_distlock.errors.StoreError` when the store refuses.

    Attributes:
        address: Where the store is, without a password: for people, and the same for all prefixes.
        identity: Equal for stores in which a key is the same lock.
        publishers: What sends the envelope of a woken run: one for each app of this process that
            uses the store. Each returns true if it has pushed the run to a worker (see `push`), and
            not given it to the broker; raises `NotOursError` for a run that others have to send,
            and `UnsendableError` for one that nobody can.
    """

    abilities: ClassVar[frozenset[Ability]]
    address: str
    identity: str
    publishers: tuple[Publisher, ...] = ()

    @abstractmethod
    def acquire(self, request: AcquireRequest) -> Reply:
        """
        Take the key for the request's lease, join its queue, or learn who holds it: in one step.

        The key goes to the first in the queue; one who does not queue does not overtake. While the
        first is on its way, one who is here and came before it has the key.
        """

    def acquire_all(
        self, keys: Sequence[str], owners: Sequence[str], lease: float, *, run: str = ""
    ) -> list[Reply] | None:
        """
        Take all the *keys*, each for its owner, if they are free and nobody waits; else none.

        None: not all of them are free, or this store cannot take several in one step; nothing was
        taken then. Not for a run whose message may have been delivered before.
        """
        return None

    def stand(
        self,
        name: str,
        run: str,
        route: Route,
        *,
        arrival: int = 0,
        park_request: ParkRequest | None = None,
        owner: str = "",
        timeout: float | None = None,
    ) -> Reply:
        """
        Have *run* stand at one of its keys, the first of which it has not: in one step.

        ``RESERVED``: the key is kept for it for some seconds; ``PARKED``: it waits in the queue,
        and when its turn comes there is a `WokenTask` for :meth:`ready`. In both cases it stays
        there until it has :meth:`depart`-ed, or has come. ``BUSY``: it has departed. ``DONE``: it
        has ended, or is not known.

        Args:
            name: The key's slot name.
            run: See :meth:`acquire`.
            route: All of its keys.
            arrival: Its place in all queues: what the `Reply` at the first key told. There itself:
                when it came, or 0.
            park_request: At the first key, when it begins to stand there.
            owner: Who holds the key for the run, and gives it up so.
            timeout: If it is given, there is one attempt of so many seconds.
        """
        raise self._cannot(Ability.PARK)

    def depart(self, name: str, run: str, *, first: bool) -> Release:
        """
        Let *run* stand no longer at a key that is kept for it; at the *first* one it is woken.

        Not `released`: the key is not kept for it (any more).
        """
        raise self._cannot(Ability.PARK)

    def ready(self, wake: WokenTask) -> Iterator[WokenTask]:
        """
        Yield what is to be sent, now that *wake* has its key: itself, or what comes of it.

        Raises:
            StoreError: A run that stands at several keys goes on later.
        """
        yield wake

    def park_if_held(
        self, key: str, run: str, park_request: ParkRequest, timeout: float, arrival: int = 0
    ) -> Reply:
        """
        Park *run* and never take the key, not even if it is free. One attempt of *timeout* seconds.

        For a worker's main process, which must not wait, and which knows of somebody who comes for
        the key; if he does not, `wake_next` is for it to call, and a sweep does it anyway. A store
        may leave the run be and answer ``FREE``: it then asks for the key where it runs. ``DONE``
        if it has ended, or was parked before, by a request that was repeated, and has the key
        reserved: it then asks as a second delivery does.

        Args:
            key: The key.
            run: As in :meth:`acquire`.
            park_request: Likewise.
            timeout: Seconds.
            arrival: As in :meth:`acquire`.
        """
        return Reply(Status.FREE, 0.0)

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

    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel | None:
        """
        Open a delivery channel: *receive* is called, in a thread, with each run pushed to it.

        What it does not take is sent by the next sweep. None if this store cannot push.
        """
        return None

    def register_channel(
        self, queues: Sequence[str], peer: PeerChannel, seconds: float
    ) -> list[PeerChannel]:
        """
        Note that a channel of this process takes woken runs of these broker queues, for *seconds*.

        0: not any more. Returns those others that do, as `find_channels`.
        """
        return []

    def find_channels(self, queues: Sequence[str], near: Sequence[str] = ()) -> list[PeerChannel]:
        """
        Return the channels of live workers that take woken runs of any of these broker queues.

        Those of the addresses *near* first, then some that have most free slots; not all of them.
        """
        return []

    def push(self, wake: WokenTask, addresses: Iterable[str]) -> bool:
        """
        Push a woken run to the first of these channels that is open; false: the broker is for it.

        What is not taken there is found by the next sweep; false if that came to pass too often.
        """
        return False

    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:  # noqa: B027  # likewise
        """
        Note that runs are with this process, which starts them when it can.

        For *seconds* nobody sends them elsewhere; 0: it does not start them any more.
        """

    def mark_published(self, wake: WokenTask) -> None:  # noqa: B027  # without a queue there is nothing to note
        """Note that a woken run's message is with the broker."""

    def mark_left(self, wake: WokenTask) -> None:  # noqa: B027  # likewise
        """Note that this process does not send a woken run: the next sweep, whosever, finds it."""

    def mark_returned(self, wake: WokenTask) -> None:  # noqa: B027  # likewise
        """Note that a run that was pushed has not ended, and is to be sent again."""

    def drop(self, wake: WokenTask, *, mark: bool = True) -> Release:
        """
        Forget a run that is on its way or unsettled: it will not run, or has ended for all.

        Its key goes to the next. If *mark*, a second delivery that comes later is recognised.
        """
        return Release(False)

    def sweep(self, interval: float) -> Iterator[WokenTask]:
        """
        Find what a crash left: free keys with waiters, runs that were woken and not sent.

        Of all processes that ask within *interval* seconds, one gets to look; none while another
        one does, nor for some time after one who took long.
        """
        yield from ()

    def wake_next(self, key: str) -> Iterator[WokenTask]:
        """Do for one key what a sweep does: wake the first who waits, if it is free."""
        yield from ()

    @abstractmethod
    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        """Look at a key without changing it; if *timeout* seconds are given, in one attempt."""

    def find_keys(self, pattern: str = "*") -> Iterator[list[str]]:
        """
        Find the keys that are held or waited for, in batches and in no order.

        Harmless to a server with many keys, and not a snapshot: what changes meanwhile may be there
        or not. A key too long to be kept comes as a :class:`~celery_distlock.keys.Name`.

        Args:
            pattern: As :mod:`fnmatch` has it, case counts.
        """
        raise self._cannot(Ability.LIST)

    def inspect_many(self, keys: Sequence[str]) -> list[KeyState]:
        """Inspect several keys; in as few requests as can be."""
        return [self.inspect(key) for key in keys]

    def waiters(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return who waits for *key*, from place *first* on; before them those on their way.

        Without their envelopes. Nobody where the store does not know them: its waiters look again
        and again.
        """
        self._require(Ability.LIST)
        return []

    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        """
        Find the keys at which runs of a task are parked or on their way: key and run.

        If *key* is given, only there.
        """
        self._require(Ability.LIST)
        return iter(())

    def parked(self, key: str, run: str) -> Waiter | None:
        """Return a run that is parked at *key*, or on its way to it, with its envelope."""
        self._require(Ability.LIST)
        return None

    def cancel(self, key: str, run: str) -> Release:
        """
        Strike a parked run that has not come to its key: it will not run. In one step.

        `released` is false if it is not parked there, runs already, or has just ended.
        """
        self._require(Ability.LIST)
        return Release(False)

    def wake_again(self, key: str) -> Iterator[WokenTask]:
        """WokenTask the next one if *key* is free, and find again every run that is on its way."""
        self._require(Ability.LIST)
        return iter(())

    def count(self, counts: Mapping[str, float]) -> None:
        """
        Add to the store's counters, for :meth:`counts`, which keeps them for thirty days.

        Asked once only: after an outage a count may be short.
        """
        raise self._cannot(Ability.COUNT)

    def counts(self) -> dict[str, float]:
        """Return what was ever counted."""
        raise self._cannot(Ability.COUNT)

    def describe(self) -> Iterator[Finding]:
        """Describe the servers: version, memory, clock, ...; what is wrong there is a doubt."""
        yield from ()

    def _require(self, ability: Ability) -> None:
        if ability not in self.abilities:
            raise self._cannot(ability)

    def _cannot(self, ability: Ability) -> StoreError:
        where = self.address
        return StoreError(f"{where} cannot {ability.value}")

    @abstractmethod
    def check(self) -> list[Finding]:
        """Return what speaks against keeping locks here; raise `StoreError` if it cannot serve."""

    @abstractmethod
    def close(self) -> None:
        """Give all connections back. The store may be used again, and opens new ones then."""

    def dispatch(
        self,
        wake: WokenTask | None,
        *,
        on_sent: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> Sending:
        """
        Send what a release woke, and return what became of that, after a moment at the latest.

        What nobody can send, because its envelope is spoilt, counts as sent: it is tried again
        after a minute, then less and less often.

        Args:
            wake: What was woken, if anything was.
            on_sent: Called when it is sent, which may be later, and in another thread.
            patience: Seconds to wait, instead of that moment.
        """
        if wake is None or (not self.publishers and wake.route is None):
            return Sending.LEFT
        became: list[Sending] = []

        def send() -> None:
            became.append(self._deliver(wake, on_sent))

        if dispatch(send, patience=patience) is Outcome.PENDING:
            return Sending.PENDING
        return became[0] if became else Sending.LEFT

    def _deliver(self, wake: WokenTask, on_sent: Callable[[], object] | None = None) -> Sending:
        try:
            became = [self._send(each, on_sent) for each in self.ready(wake)]
        except StoreError as error:
            words = "a task that waits for several keys goes on in some seconds, %s"
            logger.warning(words, error)
            return Sending.LEFT
        return Sending.LEFT if Sending.LEFT in became else Sending.SENT

    def add_publisher(self, publisher: Publisher) -> None:
        """Have *publisher* asked to send what is woken, before those that were added earlier."""
        others = [each for each in self.publishers if each != publisher]
        self.publishers = (publisher, *others)

    def publish(self, wake: WokenTask) -> bool | None:
        """
        Have the publisher whose task it is send *wake*; true: it was pushed to a worker.

        Raises:
            NotOursError: None of them may send it.
            UnsendableError: Nobody can.
        """
        refusal: NotOursError | None = None
        for publisher in self.publishers:
            try:
                return publisher(wake)
            except NotOursError as error:
                refusal = refusal or error
        raise refusal or NotOursError("this process has no publisher")

    def _send(self, wake: WokenTask, on_sent: Callable[[], object] | None) -> Sending:
        if not self.publishers:
            return Sending.LEFT
        try:
            try:
                pushed = self.publish(wake)
            except UnsendableError as error:
                _tell_unsendable(wake, error)
                pushed, on_sent = False, None
            if not pushed:
                self.mark_published(wake)
        except NotOursError as refusal:
            refusal.report()
            self._note_left(wake)
            return Sending.LEFT
        except Exception:
            logger.warning(
                "a task parked at %r was woken and could not be sent; the next sweep sends it",
                shown(key_of(wake.name)),
                exc_info=True,
            )
            return Sending.LEFT
        if on_sent is not None:
            on_sent()
        return Sending.SENT

    def _note_left(self, wake: WokenTask) -> None:
        try:
            self.mark_left(wake)
        except StoreError as error:
            logger.debug("that %r is left to others was not noted: %s", shown(wake.run), error)


def _tell_unsendable(wake: WokenTask, error: UnsendableError) -> None:
    _complaints.tell(
        (wake.name, wake.run),
        "the message of run %r, parked at %r, cannot be sent (%s); `celery locks drop %s` takes"
        " it out of the queue",
        shown(wake.run),
        shown(key_of(wake.name)),
        shown(str(error)),
        shown(task_id_of(wake.run)),
    )


_complaints = Complaints()


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
