"""
A store that queues, and the sending of the runs that it wakes.

A run that needs several keys has no process while it waits. It then holds none of its keys, and is
in one queue: that of the key that refuses it now. When that key opens, the process that opened it
tries all keys of the run in one step: the run gets all of them, or waits at the next key that
refuses it. A run that was turned away often enough keeps reservations of the keys that it could
have, while it is first in the queue of the key that it lacks. A reservation yields to a run that
came earlier. So no two runs wait for each other, and the oldest one always makes progress. Keys on
several servers are tried one after the other, and each stays reserved for some seconds.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar, TypeAlias

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import THREADS, Outcome, begin

from .base import Complaints
from .identities import task_id_of
from .listing import ListingStore
from .queue_parts import Audit, Calls, Channels, Parking, Timetable, Units
from .requests import StandRequest
from .values import Ability, Reply, Sending, Status, WokenTask

__all__ = [
    "AwaitedError",
    "NotOursError",
    "Publisher",
    "Publishers",
    "QueueStore",
    "UnsendableError",
    "ready",
    "reserve_or_queue",
    "reserve_or_queue_and_send",
]

logger = logging.getLogger(__name__)

MOST_KEYS = 10_000  # of a run; a record with more was not written by this package
MOST_TRIES = 32  # runs tried in one call; the rest is tried a moment later
SOON = 0.005  # seconds
ATTEMPTS = 10  # to reserve all keys at the same time; then a sweep takes over


class NotOursError(Exception):
    """
    A publisher may not send a woken run: it belongs to another one, here or in another process.

    Args:
        why: The reason, for people.
        report: Logs the reason; called if no publisher of this process sends the run.
    """

    def __init__(self, why: str = "", report: Callable[[], object] = lambda: None) -> None:
        super().__init__(why)
        self.report = report


class AwaitedError(Exception):
    """
    A run is not sent again: the broker was given its message, and its queue is not empty.

    Args:
        destination: As `ParkRequest.destination`.
    """

    def __init__(self, destination: str) -> None:
        super().__init__(f"there are messages in the queue of {destination}")
        self.destination = destination


class UnsendableError(Exception):
    """No publisher can send a woken run, whatever the broker's state: its envelope is corrupt."""


Publisher: TypeAlias = Callable[[WokenTask], bool | None]


class QueueStore(ListingStore):
    """
    A store that queues tasks, with all features beyond locks, listing and counters.

    Attributes:
        parking: The queues.
        channels: The channels that push woken runs to workers.
        calls: The calls that go through the store.
        timetable: The times at which keys open without a release.
        units: The units of shared keys.
        audit: The record of operators' actions.
        publishers: The publishers that send woken runs.
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
        on_sent: Callable[[WokenTask], object] | None = None,
        patience: float | None = None,
    ) -> Sending:
        return self._begin(wake, on_sent)(patience)

    def dispatch_each(
        self, wakes: Iterable[WokenTask], on_sent: Callable[[WokenTask], object], patience: float
    ) -> Iterator[Sending]:
        """
        Dispatch each of *wakes* as :meth:`dispatch` does; yield the outcomes, in their order.

        Once the first one is sent, several are sent at the same time.
        """
        sending: deque[Callable[[float], Sending]] = deque()
        most = 1
        for wake in wakes:
            sending.append(self._begin(wake, on_sent))
            if len(sending) >= most:
                yield sending.popleft()(patience)
                most = THREADS
        while sending:
            yield sending.popleft()(patience)

    def _begin(
        self, wake: WokenTask | None, on_sent: Callable[[WokenTask], object] | None
    ) -> Callable[[float | None], Sending]:
        """Begin to send *wake*; return a function that waits for that."""
        if wake is None or not (self.publishers.known or wake.route):
            return lambda _: Sending.LEFT
        became: list[Sending] = []
        wait = begin(lambda: became.append(self.publishers.deliver(wake, on_sent)), wake.name)

        def end(patience: float | None) -> Sending:
            if wait(patience) is Outcome.PENDING:
                return Sending.PENDING
            return became[0] if became else Sending.LEFT

        return end


class Publishers:
    """
    The publishers of woken runs of *store*: one for each app of this process that uses it.

    A publisher returns true if it has pushed the run to a worker (see `Channels.push`) instead of
    giving it to the broker, or has recorded that the broker has it. It raises `NotOursError` for a
    run that another publisher must send, `UnsendableError` for one that none can send, and
    `AwaitedError`. Runs that are woken together are first given to its method `push_together`, if
    it has one, which returns those that it has pushed to workers: in one request, not one each.
    """

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self.known: tuple[Publisher, ...] = ()

    def add(self, publisher: Publisher) -> None:
        """Add *publisher*; it is asked to send woken runs before those that were added earlier."""
        self._replace(publisher, publisher)

    def remove(self, publisher: Publisher) -> None:
        """Remove *publisher*."""
        self._replace(publisher)

    def _replace(self, publisher: Publisher, *by: Publisher) -> None:
        while True:
            known = self.known
            new = (*by, *(each for each in known if each != publisher))
            # Another thread may have changed them, or the finalizer of an app in this thread. No
            # such switch happens between this check and the assignment, which make no call.
            if self.known is known:
                self.known = new
                return

    def publish(self, wake: WokenTask) -> bool | None:
        """
        Send *wake* by the publisher of its task; true: nothing has to be recorded afterwards.

        Raises:
            AwaitedError: Its message may still be in the broker's queue.
            NotOursError: No publisher of this process may send it.
            UnsendableError: No publisher can send it.
        """
        refusal: NotOursError | None = None
        for publisher in self.known:
            try:
                return publisher(wake)
            except NotOursError as error:
                refusal = refusal or error
        raise refusal or NotOursError("this process has no publisher")

    def deliver(
        self, wake: WokenTask, on_sent: Callable[[WokenTask], object] | None = None
    ) -> Sending:
        """Send *wake* and the runs woken with it in this thread; see `Store.dispatch`."""
        wakes: list[WokenTask] = []
        became: list[Sending] = []
        try:
            for woken in (wake, *wake.also):
                wakes.extend(ready(self._store, woken))
        except StoreError as error:
            words = "a task that waits for several keys continues in some seconds: %s"
            logger.warning(words, error)
            became.append(Sending.LEFT)
        pushed = self._push_together(wakes) if len(wakes) > 1 else ()
        became += [self._send(each, on_sent, is_pushed=each.run in pushed) for each in wakes]
        return Sending.LEFT if Sending.LEFT in became else Sending.SENT

    def _push_together(self, wakes: list[WokenTask]) -> set[str]:
        pushed: set[str] = set()
        for publisher in self.known:
            push: Callable[[list[WokenTask]], set[str]] | None
            push = getattr(publisher, "push_together", None)
            left = [wake for wake in wakes if wake.run not in pushed]
            if push is not None and left:
                try:
                    pushed |= push(left)
                except Exception:
                    logger.debug("woken tasks are sent one by one instead", exc_info=True)
        return pushed

    def _send(
        self,
        wake: WokenTask,
        on_sent: Callable[[WokenTask], object] | None,
        *,
        is_pushed: bool,
    ) -> Sending:
        if not self.known:
            return Sending.LEFT
        parking = self._store.parking
        try:
            try:
                pushed = is_pushed or self.publish(wake)
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
            on_sent(wake)
        return Sending.SENT

    def _note(self, mark: Callable[..., None], wake: WokenTask, *facts: str) -> None:
        try:
            mark(wake, *facts)
        except StoreError as error:
            logger.debug("the outcome of sending %r was not noted: %s", shown(wake.run), error)


def _report_unsendable(wake: WokenTask, error: UnsendableError) -> None:
    _complaints.report(
        (wake.name, wake.run),
        "the message of run %r, parked at %r, cannot be sent (%s); `celery locks drop %s` removes"
        " it from the queue",
        shown(wake.run),
        shown(key_of(wake.name)),
        shown(str(error)),
        shown(task_id_of(wake.run)),
    )


_complaints = Complaints()


def reserve_or_queue(store: QueueStore, request: StandRequest) -> Reply:
    """
    Reserve all of its keys for a run, or queue it at the key that refuses it now.

    ``RESERVED``: all keys are reserved, and the run is dispatched unless it claims them itself.
    ``PARKED``: it waits in one queue; when its turn comes, a request returns a `WokenTask` for
    :func:`ready`. ``BUSY``: it is dispatched already. ``DONE``: it has ended, or is unknown.
    """
    return _try(store.parking, request, counts=False)


def reserve_or_queue_and_send(store: QueueStore, request: StandRequest) -> Reply:
    """Do as :func:`reserve_or_queue`, and send the runs that this wakes."""
    reply = reserve_or_queue(store, request)
    store.dispatch(reply.wake)
    return reply


def ready(store: QueueStore, wake: WokenTask) -> Iterator[WokenTask]:
    """
    Yield the runs to send now that *wake* has its key: itself, or others if it needs more keys.

    Raises:
        StoreError: A run of several keys could not be tried; it continues later.
    """
    wakes, tries = deque([wake]), 0
    while wakes:
        wake = wakes.popleft()
        route = wake.route
        if route is None:
            yield wake
        elif wake.name not in route.names or len(route.names) > MOST_KEYS:
            words = "the record at %r of the run %r with several keys is invalid"
            _complaints.report(wake, words, shown(wake.name), shown(wake.run))
        elif tries == MOST_TRIES:
            store.timetable.note_due({wake.name: SOON})
        else:
            tries += 1
            request = StandRequest(wake.run, route, givers=wake.givers)
            wakes.extend(_each_of(_try(store.parking, request, counts=True).wake))


def _try(parking: Parking, request: StandRequest, *, counts: bool) -> Reply:
    reply = parking.try_all(request, counts=counts)
    return _try_each(parking, request, counts=counts) if reply is None else reply


def _try_each(parking: Parking, request: StandRequest, *, counts: bool) -> Reply:
    """Try one key after the other, for keys on several servers."""
    names, run = request.route.names, request.run
    woken: list[WokenTask] = []
    for _ in range(ATTEMPTS):
        arrival, is_aged, waits = request.arrival, False, []
        for number, name in enumerate(names):
            reply, now_aged = parking.try_one(request, number, arrival, counts=counts)
            arrival, is_aged = reply.arrival, is_aged or now_aged
            waits += [name] if reply.at and number else []
            woken += _each_of(reply.wake)
            if reply.status is not Status.RESERVED:
                kept = number if is_aged and reply.place == 0 else 0
                woken += _leave_others(parking, request, number, kept, reply, counts=counts)
                return _with(reply._replace(at=name), woken)
        reserved, wakes = _reserve_each(parking, request)
        woken += wakes
        if reserved:
            for other in waits:  # last, since this process may die before
                woken += _each_of(parking.leave_one(other, run, first=False, at="").wake)
            return _with(reply, woken)
        request = request._replace(park_request=None, owners=())
    return _with(reply._replace(status=Status.PARKED, at=names[0]), woken)


def _leave_others(
    parking: Parking, request: StandRequest, at: int, kept: int, reply: Reply, *, counts: bool
) -> list[WokenTask]:
    """Let a run wait at one key only, and keep the reservations of the first *kept* others."""
    names, owners, woken = request.route.names, request.owners, []
    for number, name in enumerate(names):
        is_gone = number == 0 and reply.status is not Status.PARKED
        if number != at and not is_gone:
            left = parking.leave_one(
                name,
                request.run,
                first=number == 0,
                at=names[at],
                counts=counts,
                keeps=number < kept,
                owner=owners[number] if owners and number > at else "",
            )
            woken += _each_of(left.wake)
    return woken


def _reserve_each(parking: Parking, request: StandRequest) -> tuple[bool, list[WokenTask]]:
    """Reserve all keys, the first one last, as it dispatches the run; return whether all are."""
    woken: list[WokenTask] = []
    for name in reversed(request.route.names):
        first = name == request.route.names[0]
        reserved = parking.reserve_one(name, request.run, first=first, comes=request.comes)
        if not reserved.released:  # an earlier run has taken it
            return False, woken
        woken += _each_of(reserved.wake)
    return True, woken


def _each_of(wake: WokenTask | None) -> list[WokenTask]:
    return [] if wake is None else [wake._replace(also=()), *wake.also]


def _with(reply: Reply, woken: list[WokenTask]) -> Reply:
    wake = woken[0]._replace(also=tuple(woken[1:])) if woken else None
    return reply._replace(wake=wake)
