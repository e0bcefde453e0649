"""A store that keeps tasks until their keys are free, and what sends them then."""

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, TypeAlias

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import Outcome, dispatch

from .base import Complaints
from .channels import DeliveryChannel
from .identities import task_id_of
from .listing import ListingStore
from .requests import StandRequest
from .values import (
    ALONE,
    Ability,
    ParkRequest,
    PeerChannel,
    Release,
    Reply,
    Sending,
    Status,
    Waiter,
    Want,
    WokenTask,
)

__all__ = ["AwaitedError", "NotOursError", "ParkingStore", "Publisher", "UnsendableError"]

logger = logging.getLogger(__name__)


class NotOursError(Exception):
    """
    A publisher is not to send a woken run: it is for another one, of this process or others.

    Args:
        why: In words.
        report: Logs why; called where no publisher of this process sends the run.
    """

    def __init__(self, why: str = "", report: Callable[[], object] = lambda: None) -> None:
        super().__init__(why)
        self.report = report


class AwaitedError(Exception):
    """
    A run is not sent again: the broker was given its message, and the queue is not empty.

    Args:
        destination: As `ParkRequest.destination`.
    """

    def __init__(self, destination: str) -> None:
        super().__init__(f"there are messages in the queue of {destination}")
        self.destination = destination


class UnsendableError(Exception):
    """No publisher can send a woken run, whatever the broker's state: its envelope is spoilt."""


Publisher: TypeAlias = Callable[[WokenTask], bool | None]


class ParkingStore(ListingStore):
    """
    A store that keeps tasks until their keys are free.

    A run is parked with its envelope, by `Store.acquire` or :meth:`park_if_held`. When its turn
    comes, its key is kept for it for some seconds, and whoever asked for what freed the key is
    given a `WokenTask` to :meth:`dispatch`. A run that is not sent then, or does not come, is
    found by a :meth:`sweep`. So nothing that is parked is lost with a process.

    A store that does not push to workers (`open_channel` is None) leaves the defaults of all that
    concerns delivery channels.

    Attributes:
        publishers: What sends the envelope of a woken run: one for each app of this process that
            uses the store. Each returns true if it has pushed the run to a worker (see `push`), and
            not given it to the broker, or has noted that; raises `NotOursError` for a run that
            others have to send, `UnsendableError` for one that nobody can, and `AwaitedError`.
    """

    _ability: ClassVar[Ability | None] = Ability.PARK
    publishers: tuple[Publisher, ...] = ()

    # Queues

    def park_if_held(
        self,
        key: str,
        run: str,
        park_request: ParkRequest,
        timeout: float,
        arrival: int = 0,
        want: Want = ALONE,
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
            run: As in `AcquireRequest`.
            park_request: Likewise.
            timeout: Seconds.
            arrival: As in `AcquireRequest`.
            want: Likewise.
        """
        return Reply(Status.FREE, 0.0)

    @abstractmethod
    def stand(self, request: StandRequest) -> Reply:
        """
        Have a run stand at one of its keys, the first of which it has not: in one step.

        ``RESERVED``: the key is kept for it for some seconds; ``PARKED``: it waits in the queue,
        and when its turn comes there is a `WokenTask` for :meth:`ready`. In both cases it stays
        there until it has :meth:`depart`-ed, or has come. ``BUSY``: it has departed. ``DONE``: it
        has ended, or is not known.
        """

    @abstractmethod
    def depart(self, name: str, run: str, *, first: bool) -> Release:
        """
        Let *run* stand no longer at a key that is kept for it; at the *first* one it is woken.

        Not `released`: the key is not kept for it (any more).
        """

    @abstractmethod
    def ready(self, wake: WokenTask) -> Iterator[WokenTask]:
        """
        Yield what is to be sent, now that *wake* has its key: itself, or what comes of it.

        Raises:
            StoreError: A run that stands at several keys goes on later.
        """

    @abstractmethod
    def sweep(self, interval: float) -> Iterator[WokenTask]:
        """
        Find what a crash left: free keys with waiters, runs that were woken and not sent.

        Of all processes that ask within *interval* seconds, one gets to look; none while another
        one does, nor for some time after one who took long.
        """

    @abstractmethod
    def wake_next(self, key: str) -> Iterator[WokenTask]:
        """Do for one key what a sweep does: wake the first who waits, if it is free."""

    # Woken runs

    @abstractmethod
    def mark_published(self, wake: WokenTask) -> None:
        """Note that a woken run's message is with the broker."""

    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        """
        Note that a run's message may still be in the broker's queue.

        A sweep finds it again later, and for some seconds nothing else that the broker was given
        for this *destination*. Asked of a store whose woken runs say that they were `published`.
        """

    @abstractmethod
    def mark_left(self, wake: WokenTask) -> None:
        """Note that this process does not send a woken run: the next sweep, whosever, finds it."""

    @abstractmethod
    def mark_returned(self, wake: WokenTask) -> None:
        """Note that a run that was pushed has not ended, and is to be sent again."""

    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:
        """
        Note that runs are with this process, which starts them when it can.

        For *seconds* nobody sends them elsewhere; 0: it does not start them any more.
        """

    # Delivery channels

    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel | None:
        """
        Open a delivery channel: *receive* is called, in a thread, with each run pushed to it.

        What it does not take is sent by the next sweep. None if this store cannot push.
        """
        return None

    def register_channel(self, queues: Sequence[str], peer: PeerChannel, seconds: float) -> None:
        """
        Note that a channel of this process takes woken runs of these broker queues, for *seconds*.

        0: not any more.
        """

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

    # For operators

    @abstractmethod
    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        """
        Find the keys at which runs of a task are parked or on their way: key and run.

        If *key* is given, only there.
        """

    @abstractmethod
    def parked(self, key: str, run: str) -> Waiter | None:
        """Return a run that is parked at *key*, or on its way to it, with its envelope."""

    @abstractmethod
    def cancel(self, key: str, run: str) -> Release:
        """
        Strike a parked run that has not come to its key: it will not run. In one step.

        `released` is false if it is not parked there, runs already, or has just ended.
        """

    @abstractmethod
    def wake_again(self, key: str) -> Iterator[WokenTask]:
        """Wake the next one if *key* is free, and find again every run that is on its way."""

    # Sending

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
            became = [
                self._send(each, on_sent)
                for woken in (wake, *wake.also)
                for each in self.ready(woken)
            ]
        except StoreError as error:
            words = "a task that waits for several keys goes on in some seconds, %s"
            logger.warning(words, error)
            return Sending.LEFT
        return Sending.LEFT if Sending.LEFT in became else Sending.SENT

    def add_publisher(self, publisher: Publisher) -> None:
        """Have *publisher* asked to send what is woken, before those that were added earlier."""
        self._replace_publisher(publisher, publisher)

    def remove_publisher(self, publisher: Publisher) -> None:
        """Have *publisher* asked no more."""
        self._replace_publisher(publisher)

    def _replace_publisher(self, publisher: Publisher, *by: Publisher) -> None:
        while True:
            known = self.publishers
            new = (*by, *(each for each in known if each != publisher))
            # Another thread may have changed them, or a finalizer of an app in this one; but not
            # without a call in between.
            if self.publishers is known:
                self.publishers = new
                return

    def publish(self, wake: WokenTask) -> bool | None:
        """
        Have the publisher whose task it is send *wake*; true: nothing more has to be noted.

        Raises:
            AwaitedError: It may still be in the broker's queue.
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
        except AwaitedError as error:
            self._note_awaited(wake, error.destination)
            return Sending.SENT
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

    def _note_awaited(self, wake: WokenTask, destination: str) -> None:
        try:
            self.mark_awaited(wake, destination)
        except StoreError as error:
            logger.debug("that %r is awaited was not noted: %s", shown(wake.run), error)

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
