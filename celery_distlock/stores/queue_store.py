"""
A store that queues, and what becomes of the runs that it wakes.

A run that needs several keys has no process while it waits. It waits at its keys in one order, the
same for all runs: at the first that it cannot have, in the queue, by the time when it came to the
first of all, and what it has is reserved for it. When it has that key, too, the process that has
freed it has the run wait at the next, and so on, until it has all: then it is woken, once.

No run waits for ever. What is reserved for one that still waits goes to an earlier one that waits
there, so the eldest always gets on; and it is reserved for some seconds only, after which the run
is still the first in that queue, but a blocked caller there goes before it once: that one may have
the key that the run waits for.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from typing import ClassVar, TypeAlias

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import Outcome, dispatch

from .base import Complaints
from .identities import task_id_of
from .listing import ListingStore
from .queue_parts import Audit, Calls, Channels, Parking, Timetable, Units
from .requests import StandRequest
from .values import Ability, Release, Reply, Route, Sending, Status, WokenTask

__all__ = [
    "AwaitedError",
    "NotOursError",
    "Publisher",
    "Publishers",
    "QueueStore",
    "UnsendableError",
    "begin_at_first_key",
    "ready",
]

logger = logging.getLogger(__name__)

MOST_KEYS = 10_000  # of a run; a record that names more is not ours
ATTEMPTS = 10  # to find all reserved at once; else it goes on when a reservation has ended


class NotOursError(Exception):
    """
    A publisher may not send a woken run: it is for another one, of this process or others.

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
    """No publisher can send a woken run, however the broker is: its envelope is spoilt."""


Publisher: TypeAlias = Callable[[WokenTask], bool | None]


class QueueStore(ListingStore):
    """
    A store that queues tasks: all that is done beyond a lock, its list and its counters.

    Attributes:
        parking: Its queues.
        channels: How woken runs are pushed to workers.
        calls: Calls that go through the store.
        timetable: When time alone opens keys.
        units: What several holders have of a key.
        audit: What operators do to its keys.
        publishers: What sends the envelopes of woken runs.
    """

    _ability: ClassVar[Ability | None] = Ability.QUEUE
    parking: Parking
    channels: Channels
    calls: Calls
    timetable: Timetable
    units: Units
    audit: Audit

    def __init__(self) -> None:
        self.publishers = Publishers(self)

    def dispatch(
        self,
        wake: WokenTask | None,
        *,
        on_sent: Callable[[], object] | None = None,
        patience: float | None = None,
    ) -> Sending:
        if wake is None or not (self.publishers.known or wake.route):
            return Sending.LEFT
        became: list[Sending] = []

        def send() -> None:
            became.append(self.publishers.deliver(wake, on_sent))

        if dispatch(send, patience=patience) is Outcome.PENDING:
            return Sending.PENDING
        return became[0] if became else Sending.LEFT


class Publishers:
    """
    What sends the woken runs of *store*: one publisher for each app of this process that uses it.

    A publisher returns true if it has pushed the run to a worker (see `Channels.push`), and not
    given it to the broker, or has noted that; it raises `NotOursError` for a run that others have
    to send, `UnsendableError` for one that none can, and `AwaitedError`.
    """

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self.known: tuple[Publisher, ...] = ()

    def add(self, publisher: Publisher) -> None:
        """Have *publisher* asked to send what is woken, before those that were added earlier."""
        self._replace(publisher, publisher)

    def remove(self, publisher: Publisher) -> None:
        """Stop asking *publisher*."""
        self._replace(publisher)

    def _replace(self, publisher: Publisher, *by: Publisher) -> None:
        while True:
            known = self.known
            new = (*by, *(each for each in known if each != publisher))
            # Another thread may have changed them, or a finalizer of an app in this one; but not
            # without a call in between.
            if self.known is known:
                self.known = new
                return

    def publish(self, wake: WokenTask) -> bool | None:
        """
        Have the publisher of its task send *wake*; true: nothing more has to be noted.

        Raises:
            AwaitedError: It may still be in the broker's queue.
            NotOursError: None of them may send it.
            UnsendableError: None can.
        """
        refusal: NotOursError | None = None
        for publisher in self.known:
            try:
                return publisher(wake)
            except NotOursError as error:
                refusal = refusal or error
        raise refusal or NotOursError("this process has no publisher")

    def deliver(self, wake: WokenTask, on_sent: Callable[[], object] | None = None) -> Sending:
        """Send *wake* and those woken with it here and now; see `Store.dispatch`."""
        try:
            became = [
                self._send(each, on_sent)
                for woken in (wake, *wake.also)
                for each in ready(self._store, woken)
            ]
        except StoreError as error:
            words = "a task that waits for several keys goes on in some seconds, %s"
            logger.warning(words, error)
            return Sending.LEFT
        return Sending.LEFT if Sending.LEFT in became else Sending.SENT

    def _send(self, wake: WokenTask, on_sent: Callable[[], object] | None) -> Sending:
        if not self.known:
            return Sending.LEFT
        parking = self._store.parking
        try:
            try:
                pushed = self.publish(wake)
            except UnsendableError as error:
                _report_unsendable(wake, error)
                pushed, on_sent = False, None
            if not pushed:
                parking.mark_published(wake)
        except AwaitedError as error:
            self._note(parking.mark_awaited, wake, error.destination)
            return Sending.SENT
        except NotOursError as refusal:
            refusal.report()
            self._note(parking.mark_left, wake)
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

    def _note(self, mark: Callable[..., None], wake: WokenTask, *facts: str) -> None:
        try:
            mark(wake, *facts)
        except StoreError as error:
            logger.debug("what became of %r was not noted: %s", shown(wake.run), error)


def _report_unsendable(wake: WokenTask, error: UnsendableError) -> None:
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


def ready(store: QueueStore, wake: WokenTask) -> Iterator[WokenTask]:
    """
    Yield what has to be sent, now that *wake* has its key: itself, or what comes of it.

    Raises:
        StoreError: A run that waits for several keys goes on later.
    """
    wakes = deque([wake])
    while wakes:
        wake = wakes.popleft()
        route = wake.route
        if route is None:
            yield wake
        elif wake.name in route.names and len(route.names) <= MOST_KEYS:
            wakes.extend(_advance(store, wake, route))
        else:
            words = "the record at %r of a run %r with several keys is not ours"
            _complaints.tell(wake, words, shown(wake.name), shown(wake.run))


def begin_at_first_key(store: QueueStore, request: StandRequest) -> Reply:
    """Have a run wait at the first of its keys; others have it go on from there."""
    reply = store.parking.stand(request)
    if reply.status is Status.RESERVED:
        store.dispatch(WokenTask(request.name, request.run, b"", request.route))
    store.dispatch(reply.wake)
    return reply


def _advance(store: QueueStore, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
    """Have a run wait at its keys, as far as it comes; if that is all of them, wake it."""
    reply = store.parking.stand_at_all(wake.run, route)
    if reply is None:
        yield from _advance_by_steps(store, wake, route)
        return
    yield from _woken(reply)
    yield from _leave(store, wake, route, reply)


def _leave(store: QueueStore, wake: WokenTask, route: Route, reply: Reply) -> Iterator[WokenTask]:
    """Free the key that a run has, if it no longer waits at its first one."""
    if reply.status is Status.DONE and wake.name != route.names[0]:
        yield from _woken(store.drop(wake, mark=False))


def _advance_by_steps(store: QueueStore, wake: WokenTask, route: Route) -> Iterator[WokenTask]:
    parking, first = store.parking, route.names[0]
    for _ in range(ATTEMPTS):
        arrival = 0
        for name in route.names:
            reply = parking.stand(StandRequest(name, wake.run, route, arrival))
            arrival = reply.arrival
            yield from _woken(reply)
            if reply.status is not Status.RESERVED:
                yield from _leave(store, wake, route, reply)
                return
        departed = []
        for name in reversed(route.names):  # the first one last: from there it is sent
            departed.append(parking.depart(name, wake.run, first=name == first))
            if not departed[-1].released:
                break
        else:
            yield from _woken(departed[-1])
            return
        # One was given to a run that came before it, and that may need the others, too.
        for name in route.names[-len(departed) :]:
            yield from _woken(parking.stand(StandRequest(name, wake.run, route, arrival)))


def _woken(answer: Release | Reply) -> Iterator[WokenTask]:
    if answer.wake is not None:
        yield answer.wake
