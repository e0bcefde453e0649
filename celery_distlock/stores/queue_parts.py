"""The interfaces of a store that queues, and the values that they return."""

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .channels import DeliveryChannel, Inbox
from .requests import Identity, SendRequest, StandRequest
from .values import (
    ALONE,
    Action,
    Destinations,
    Lane,
    Limit,
    ParkRequest,
    PeerChannel,
    Release,
    Reply,
    Waiter,
    Want,
    WokenTask,
)

__all__ = [
    "NO_CLAIM",
    "Audit",
    "Bearer",
    "Calls",
    "Channels",
    "Claim",
    "Dues",
    "Parking",
    "SendReply",
    "Sent",
    "Settled",
    "Timetable",
    "Units",
    "Where",
]


class Parking(ABC):
    """
    The queues: runs that are parked with their envelopes until their keys are free.

    `Store.acquire` parks a run, and so does :meth:`park_if_held`. When its turn comes, its key is
    reserved for it for some seconds, and the request that has freed the key returns a `WokenTask`
    for `Store.dispatch`. If it is not sent, or does not claim the key, :meth:`sweep` finds it: no
    parked task is lost with a process.
    """

    @abstractmethod
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

        For a worker's main process, which must not block, and which knows of another run that is
        dispatched for the key. If that run does not claim the key, the caller may call `wake_next`;
        otherwise a sweep wakes the next one. Arguments as in `AcquireRequest`.

        Returns:
            ``PARKED``; ``FREE``: nothing was done, and the run asks for the key where it executes;
            ``DONE``: the run has ended, or an earlier attempt has parked it and the key is reserved
            for it: it asks as a second delivery does; ``FULL``: as many wait as *park_request*
            allows.
        """

    @abstractmethod
    def try_all(self, request: StandRequest, *, counts: bool) -> Reply | None:
        """
        Reserve all of its keys for a run, or queue it at the key that refuses it, in one step.

        *counts*: one of its keys has opened, so a refusal counts as one more time that the run was
        turned away. None: the keys are on several servers; use :meth:`try_one`.
        """

    @abstractmethod
    def try_one(
        self, request: StandRequest, number: int, arrival: int, *, counts: bool
    ) -> tuple[Reply, bool]:
        """
        Try the key with this *number*, from 0, of the request.

        ``RESERVED``: the key is reserved for the run, for some seconds; ``PARKED``: the run waits
        there. *arrival* is when the run came; after the first key, that of the first key's `Reply`.

        The second value is true if the run was turned away so often that other keys stay reserved
        for it.
        """

    @abstractmethod
    def reserve_one(self, name: str, run: str, *, first: bool, comes: bool) -> Release:
        """
        Confirm the reservation of a key for *run*; at the *first* key, dispatch the run.

        With *comes*, the run claims its keys itself and is not dispatched. If `released` is false,
        the key is not reserved for the run, or no longer.
        """

    @abstractmethod
    def leave_one(
        self,
        name: str,
        run: str,
        *,
        first: bool,
        at: str,
        counts: bool = False,
        keeps: bool = False,
        owner: str = "",
    ) -> Release:
        """
        Remove *run*, which waits *at* another key, from the queue of the key *name*.

        Its reservation there is given up, unless *keeps*. *counts* as in :meth:`try_all`. If
        *owner* holds the key for the run, it releases the key.
        """

    @abstractmethod
    def sweep(self, interval: float) -> Iterator[WokenTask]:
        """
        Find what a crash left behind: free keys with waiters, runs that were woken and not sent.

        Of all processes that call this within *interval* seconds, only one sweeps. None does while
        another one sweeps, nor for some time after a sweep that took long.
        """

    @abstractmethod
    def destinations(self, keys: Sequence[str]) -> list[Destinations]:
        """
        Count the runs of each of *keys* by the destination of their messages; changes nothing.

        Of a key with many runs, as many are read as for a key with some. Their destinations are in
        about the same proportions as those of all.
        """

    @abstractmethod
    def wake_next(self, key: str) -> Iterator[WokenTask]:
        """Wake the first waiter of *key* if the key is free, as a sweep does."""

    @abstractmethod
    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        """
        Wake the runs that time alone admits, and yield those to send.

        Puts into *again* the seconds until each key is due next, for `Timetable.claim_due`.
        """

    @abstractmethod
    def wake_again(self, key: str) -> Iterator[WokenTask]:
        """Wake the next waiter if *key* is free, and yield every dispatched run again."""

    @abstractmethod
    def mark_published(self, wake: WokenTask) -> None:
        """Record that the broker has a woken run's message."""

    @abstractmethod
    def mark_all_published(self, wakes: Sequence[WokenTask]) -> None:
        """Record that the broker has the messages of several woken runs."""

    @abstractmethod
    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        """
        Record that a run's message may still be in the broker's queue.

        A sweep finds the run again later. For some seconds it skips all runs whose message the
        broker was given for this *destination*. Only for runs that are `published`.
        """

    @abstractmethod
    def mark_left(self, wake: WokenTask) -> None:
        """Record that this process does not send a woken run, so the next sweep finds it."""

    @abstractmethod
    def mark_returned(self, wake: WokenTask) -> None:
        """Record that a pushed run has not ended and must be sent again."""

    @abstractmethod
    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:
        """
        Record that this process has the runs and starts them when it can.

        For *seconds* no other process sends them. 0: this process does not start them either.
        """

    @abstractmethod
    def lanes(self, key: str, limit: int = 100) -> list[Lane]:
        """Return up to *limit* lanes with waiters at *key*, the one that has its turn first."""

    @abstractmethod
    def lane_waiters(
        self, key: str, lane: str, *, first: int = 0, limit: int = 100
    ) -> list[Waiter]:
        """
        Return a page of the waiters of one lane of *key*, as `ListingStore.waiters` does of all.

        An empty *lane* has the waiters that have asked for none.
        """

    @abstractmethod
    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        """
        Yield the key and the run of each parked or dispatched run of a task.

        If *key* is given, look only there.
        """

    @abstractmethod
    def parked(self, key: str, run: str) -> Waiter | None:
        """Return a run that is parked at *key* or dispatched for it, with its envelope, or None."""

    @abstractmethod
    def cancel(self, key: str, run: str) -> Release:
        """
        Remove a parked run that has not claimed its key, so that it does not execute, in one step.

        `released` is false if it is not parked there, executes already, or has just ended.
        """


class Channels(ABC):
    """The delivery channels, which push woken runs to workers without the broker."""

    @abstractmethod
    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel:
        """
        Open a delivery channel: *receive* is called, in a thread, with each run pushed to it.

        The next sweep sends the runs that it does not take.
        """

    @abstractmethod
    def register_channel(self, queues: Sequence[str], peer: PeerChannel, seconds: float) -> None:
        """
        Announce for *seconds* that a channel of this process takes woken runs of broker *queues*.

        0: withdraw the announcement.
        """

    @abstractmethod
    def find_channels(self, queues: Sequence[str], near: Sequence[str] = ()) -> list[PeerChannel]:
        """
        Return channels of live workers that take woken runs of any of these broker queues.

        Those at the addresses *near* come first, then some of those with the most free slots. Not
        all channels are returned.
        """

    def push(self, wake: WokenTask, addresses: Iterable[str]) -> bool:
        """
        Push a woken run to the first of these channels that is open; false: send it by the broker.

        If the channel does not take it, the next sweep finds it. Also false if that has happened
        too often.
        """
        return self.push_all([(wake, addresses)])[0]

    @abstractmethod
    def push_all(self, pushes: Sequence[tuple[WokenTask, Iterable[str]]]) -> list[bool]:
        """Push each run as :meth:`push` does, all in one request."""


class Audit(ABC):
    """The record of what operators do to keys, which is kept for a limited time."""

    @abstractmethod
    def record_action(self, key: str, action: Action) -> bool:
        """
        Record an operator's action on *key*; return whether it was recorded.

        Called before the action itself, so that the holder that loses the key can learn why. An
        action with `owners` is recorded only if one of these holds the key.
        """

    @abstractmethod
    def actions(self, key: str) -> list[Action]:
        """Return operators' actions on *key*, the latest first."""

    @abstractmethod
    def keys_acted_on(self) -> Iterator[list[str]]:
        """Yield all keys with recorded actions, in batches."""

    @abstractmethod
    def why_lost(self, key: str, owner: str, patience: float = 0.0) -> str:
        """
        Return which operator has taken *key* from *owner*, and why; empty if unknown.

        With *patience*, read the record, in at most that many seconds. Without it, return only what
        a renewal has found that was refused, or answered ``RECALLED``.
        """


class Claim(NamedTuple):
    """
    The answer to `Timetable.claim_due`.

    Attributes:
        leads: Whether the caller is the ticker. If not, another process is.
        pause: Seconds until the next key is due; if another process is the ticker, until that one
            must renew its claim. Infinity: nothing is due.
        names: The slot names of keys that are due. For some seconds only the ticker looks at them.
        late: Seconds for which the first of them has been due.
        number: The id of this claim.
    """

    leads: bool
    pause: float
    names: tuple[str, ...] = ()
    late: float = 0.0
    number: str = ""


class Settled(NamedTuple):
    """
    The outcome of a claim.

    Attributes:
        number: The id of the claim.
        again: The keys that were looked at, each with the seconds until it is due again; None: it
            is not due again.
    """

    number: str
    again: Mapping[str, float | None]


NO_CLAIM = Settled("", {})


class Dues(NamedTuple):
    """
    A snapshot of the timetable.

    Attributes:
        ticker: The process that is the ticker; empty: none is.
        many: Number of keys that are noted.
        first: Seconds until the first of them is due; negative if it is overdue.
    """

    ticker: str
    many: int
    first: float


class Timetable(ABC):
    """
    When time alone opens keys.

    A key is due when it may be granted without a release: a rest or an operator's limit ends, or a
    rate allows the next start. A process that learns this from the store notes it here. One of all
    workers' main processes is the ticker, which looks at each key when it is due. If a process died
    before it noted a key, a sweep finds that key.
    """

    @abstractmethod
    def note_due(self, dues: Mapping[str, float]) -> None:
        """
        Note the seconds until keys, by slot names, are due, and notify the ticker if it sleeps.

        If a key is noted already, the earlier time counts. Does not raise: a sweep finds what could
        not be noted.
        """

    @abstractmethod
    def claim_due(
        self, process: str, inbox: Inbox, seconds: float, settled: Settled = NO_CLAIM
    ) -> Claim:
        """
        Become or remain the ticker for *seconds*, and claim the keys that are due. One attempt.

        Args:
            process: The name of the calling process, one word.
            inbox: Notified when a key becomes due earlier than any that was known.
            seconds: 0: stop being the ticker.
            settled: The outcome of the previous claim.
        """

    @abstractmethod
    def led_for(self) -> float:
        """
        Return the seconds for which a process is the ticker; 0: there may be none.

        Cheaper than :meth:`claim_due`, for a process to which that said that another one is.
        """

    @abstractmethod
    def ticker_inbox(self, process: str) -> Inbox:
        """Return the inbox in which *process* waits as the ticker."""

    @abstractmethod
    def dues(self) -> Dues:
        """Return a snapshot of the timetable; changes nothing."""


class Sent(enum.Enum):
    """The outcome of `Calls.send`."""

    GO = "go"  # the key is reserved for the run: the caller publishes its message
    QUEUED = "queued"  # the store has the run, and the caller has nothing left to do
    LATER = "later"  # like QUEUED; the run joins the queue when its delay is over
    UPDATED = "updated"  # like QUEUED; the run was there already, and now has this envelope
    CHANGED = "changed"  # nothing was done: the identity is not that of the expected run
    FULL = "full"  # nothing was done: as many wait as the request allows


class SendReply(NamedTuple):
    """
    The answer to `Calls.send`.

    Attributes:
        sent: The outcome.
        wake: What the request has woken, as for a release.
        holder: After ``FULL``, the holder of the key, if it has one.
        remaining: Seconds left of its lease.
    """

    sent: Sent
    wake: WokenTask | None = None
    holder: str = ""
    remaining: float = 0.0


class Where(enum.Enum):
    """The state of a run that has an identity."""

    WAITING = "waiting"  # in the queue, or until its delay is over
    COMING = "coming"  # dispatched, or waiting again after it was dispatched
    RUNNING = "running"
    ENDED = "ended"  # or unknown, while the identity still lasts


class Bearer(NamedTuple):
    """
    The run that has an identity.

    Attributes:
        run: The run.
        where: Its state.
        expires: Seconds until it loses the identity unless it has started.
        silent: Whether its result is not stored.
        fixed: Whether its message must not be replaced.
        lasts: Seconds for which it keeps the identity in any case.
    """

    run: str
    where: Where
    expires: float = math.inf
    silent: bool = False
    fixed: bool = False
    lasts: float = 0.0


class Calls(ABC):
    """
    Calls that go through the store before they are published to the broker.

    Once `send` has answered, the store has the run, as if it were parked. After ``GO`` the run is
    dispatched: the caller publishes its envelope and calls `Parking.mark_published`. If the caller
    dies or cannot publish, a sweep sends the run.
    """

    @abstractmethod
    def send(self, request: SendRequest) -> SendReply:
        """
        Reserve the key for a run, add the run to the end of the queue, or keep it until its time.

        A run that waits, is dispatched, or holds the key is not added again, and its first envelope
        counts. The answer is then ``QUEUED``, or the same as the first time.

        A run that its identity recalls is asked to leave, as by `Store.recall`: at once if it holds
        the key, else when it begins. Once asked, it does not begin again: `Store.acquire` answers a
        second delivery of it with ``RECALLED``, unless it still holds the key, or has ended. For
        stores with the ability ``RECALL``.

        A run that is kept until its time is not counted among those that wait, and never refused.
        """

    @abstractmethod
    def peek(self, key: str, identity: str) -> Bearer | None:
        """Return the run that has an identity, or None. One attempt; changes nothing."""

    @abstractmethod
    def inherit(self, key: str, identity: Identity, run: str) -> None:
        """
        Transfer to *run* the identity that an earlier execution of its task had.

        Changes nothing if another task has the identity.
        """

    @abstractmethod
    def bearers(self, key: str, limit: int = 100) -> dict[str, Bearer]:
        """
        Return up to *limit* runs that have identities, by identity, in no particular order.

        Only their `run` and `where` are filled.
        """

    @abstractmethod
    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return the runs that join the queue of *key* later, from number *first* on, earliest first.

        A run that has since arrived by a message may keep its number but is not returned. So a page
        with fewer than *limit* runs, or with none, may not be the last one. All numbers are below
        `KeyState.later`, or below 50 if that is more.

        The envelopes are not included. `Waiter.due` is when a run joins.
        """


class Units(ABC):
    """
    The units of a key, which several requests may hold, each with a weight.

    All requests are admitted by the same rule. An exclusive request needs a key without other
    holders. For any other request, the units in use and its own must not exceed the capacity that
    it names, or an operator's limit. The queue is strict: no request overtakes an earlier one, even
    if it would fit, so none starves. Freed units go to as many waiters as fit.
    """

    @abstractmethod
    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        """
        Make the hold of *owner*, which shares the key, exclusive; may be repeated.

        ``GRANTED``: with a new token. ``BUSY``: there are other holders. With an *inbox* it now
        waits ahead of the whole queue, and nothing is granted to others. It is notified when the
        last of the other holders has left, and must then ask again. ``DEADLOCK``: another holder
        already waits to upgrade. ``FREE``: *owner* does not hold the key (by now).
        """

    @abstractmethod
    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        """
        Make the exclusive hold of *owner* shared, without a gap in which another could be granted.

        It gets back the units and the slot that it had before its :meth:`upgrade`. If it was
        exclusive from the beginning, it gets one unit of any number.

        Never refused: ``GRANTED`` with the token of the shared hold, and the waiters that fit are
        woken. ``FREE``: *owner* does not hold the key (by now). If it waits in `upgrade`, it stops
        waiting and keeps what it had: ``GRANTED`` with the token of that.
        """

    @abstractmethod
    def rest(self, key: str, owner: str, seconds: float) -> bool:
        """
        Grant nothing for *seconds* from now; the present holders are not affected.

        False: *owner* does not hold the key (by now).
        """

    @abstractmethod
    def set_limit(self, key: str, limit: Limit | None, lane: str | None = None) -> Release:
        """
        Set an operator's limit, or remove it, and wake the waiters that fit. Sets `since`.

        With *lane* it is that of one lane, and replaces the `most` of its requests.
        """
