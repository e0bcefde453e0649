"""The parts of a store that queues, and what they answer."""

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
    for `Store.dispatch`. A run that is not sent then, or does not come, is found by :meth:`sweep`:
    no parked task is lost with a process.
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

        For a worker's main process, which must not wait, and which knows of another run that is
        dispatched for the key. If that one does not come, `wake_next` is for the caller, and a
        sweep does it anyway. Arguments as in `AcquireRequest`.

        Returns:
            ``PARKED``; ``FREE``: nothing was done, and the run asks for the key where it executes;
            ``DONE``: the run has ended, or an earlier attempt has parked it and the key is reserved
            for it: it asks as a second delivery does.
        """

    @abstractmethod
    def try_all(self, request: StandRequest, *, counts: bool) -> Reply | None:
        """
        Reserve all of its keys for a run, or have it wait at the one that refuses it: in one step.

        If one of them has opened, and the run is turned away, that *counts*. None: the keys are in
        several places, so it is for :meth:`try_one`.
        """

    @abstractmethod
    def try_one(
        self, request: StandRequest, number: int, arrival: int, *, counts: bool
    ) -> tuple[Reply, bool]:
        """
        Try the key with this *number*, from 0, of the request.

        ``RESERVED``: it is kept for the run, for some seconds; ``PARKED``: the run waits there.
        *arrival* is what the `Reply` at the first key says; there, when the run came. Returned is
        also whether the run was turned away so often that other keys are kept for it.
        """

    @abstractmethod
    def reserve_one(self, name: str, run: str, *, first: bool, comes: bool) -> Release:
        """
        Reserve a key that is kept for *run*; at the *first* put it on its way, if it does not come.

        Not `released`: the key is not, or no longer, kept for it.
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
        Have *run*, which waits *at* another key, wait no longer at one.

        What was kept there is given back, unless it *keeps* it. That it was turned away may count.
        The *owner* that holds the key for it gives it up.
        """

    @abstractmethod
    def sweep(self, interval: float) -> Iterator[WokenTask]:
        """
        Find what a crash left: free keys with waiters, runs that were woken and not sent.

        Of all processes that ask within *interval* seconds one gets to look; none while another
        one does, nor for some time after one that took long.
        """

    @abstractmethod
    def wake_next(self, key: str) -> Iterator[WokenTask]:
        """Do for one key what a sweep does: wake the first waiter, if it is free."""

    @abstractmethod
    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        """
        Wake the runs that time lets have their keys, and yield those to send.

        Puts into *again* in how many seconds each key is due next, for `Timetable.claim_due`.
        """

    @abstractmethod
    def wake_again(self, key: str) -> Iterator[WokenTask]:
        """Wake the next one if *key* is free, and find again every run that is dispatched."""

    @abstractmethod
    def mark_published(self, wake: WokenTask) -> None:
        """Note that a woken run's message is with the broker."""

    @abstractmethod
    def mark_all_published(self, wakes: Sequence[WokenTask]) -> None:
        """Note the same of several runs."""

    @abstractmethod
    def mark_awaited(self, wake: WokenTask, destination: str) -> None:
        """
        Note that a run's message may still be in the broker's queue.

        A sweep finds it again later, and for some seconds nothing else that the broker was given
        for this *destination*. Asked only of runs that are `published`.
        """

    @abstractmethod
    def mark_left(self, wake: WokenTask) -> None:
        """Note that this process does not send a woken run: the next sweep of any finds it."""

    @abstractmethod
    def mark_returned(self, wake: WokenTask) -> None:
        """Note that a run that was pushed has not ended, and has to be sent again."""

    @abstractmethod
    def keep_reserved(self, wakes: Sequence[WokenTask], seconds: float) -> None:
        """
        Note that runs are with this process, which starts them when it can.

        For *seconds* no other process sends them; 0: nor does this one start them.
        """

    @abstractmethod
    def find_parked(self, task_id: str, key: str | None = None) -> Iterator[tuple[str, str]]:
        """
        Find the keys at which runs of a task are parked or dispatched: key and run.

        If *key* is given, only there.
        """

    @abstractmethod
    def parked(self, key: str, run: str) -> Waiter | None:
        """Return a run that is parked at *key*, or dispatched for it, with its envelope."""

    @abstractmethod
    def cancel(self, key: str, run: str) -> Release:
        """
        Remove a parked run that has not come to its key, so that it does not execute: in one step.

        `released` is false if it is not parked there, executes already, or has just ended.
        """


class Channels(ABC):
    """The delivery channels, by which woken runs are pushed to workers past the broker."""

    @abstractmethod
    def open_channel(self, receive: Callable[[WokenTask], object]) -> DeliveryChannel:
        """
        Open a delivery channel: *receive* is called, in a thread, with each run pushed to it.

        What it does not take is sent by the next sweep.
        """

    @abstractmethod
    def register_channel(self, queues: Sequence[str], peer: PeerChannel, seconds: float) -> None:
        """
        Note that a channel of this process takes woken runs of these broker queues, for *seconds*.

        0: not any more.
        """

    @abstractmethod
    def find_channels(self, queues: Sequence[str], near: Sequence[str] = ()) -> list[PeerChannel]:
        """
        Return the channels of live workers that take woken runs of any of these broker queues.

        Those of the addresses *near* first, then some that have most free slots; not all of them.
        """

    @abstractmethod
    def push(self, wake: WokenTask, addresses: Iterable[str]) -> bool:
        """
        Push a woken run to the first of these channels that is open; false: the broker is for it.

        What is not taken there is found by the next sweep; false if that came to pass too often.
        """


class Audit(ABC):
    """The record of what operators do to keys, which is kept for a time."""

    @abstractmethod
    def record_action(self, key: str, action: Action) -> bool:
        """
        Record what an operator does to *key*; return whether it is recorded.

        Before it is done, so that the holder that loses the key can learn why. An action with
        `owners` is recorded if one of these holds the key.
        """

    @abstractmethod
    def actions(self, key: str) -> list[Action]:
        """Return what operators did to *key*, the last first."""

    @abstractmethod
    def why_lost(self, key: str, owner: str, patience: float = 0.0) -> str:
        """
        Return which operator has taken *key* from *owner*, and why; empty if that is not known.

        With *patience*, look at the record, for at most that many seconds. Without it, return only
        what a refused renewal has found.
        """


class Claim(NamedTuple):
    """
    The answer to the ticker's question what is due.

    Attributes:
        leads: Whether the process is the ticker; else another one is.
        pause: Seconds until the next name is due; where another process is the ticker, until that
            one has to renew its claim. Infinity: nothing is due.
        names: What is due, by slot names: the ticker's own to look at, for some seconds.
        late: Seconds for which the first of them has been due.
        number: Names this claim.
    """

    leads: bool
    pause: float
    names: tuple[str, ...] = ()
    late: float = 0.0
    number: str = ""


class Settled(NamedTuple):
    """
    What came of a claim.

    Attributes:
        number: Of the claim.
        again: What was looked at, with the seconds in which it is due again; None: it is not.
    """

    number: str
    again: Mapping[str, float | None]


NO_CLAIM = Settled("", {})


class Dues(NamedTuple):
    """
    A look at what is due.

    Attributes:
        ticker: The process that looks after it; empty: none.
        many: How many names are noted.
        first: Seconds until the first of them is due; less than 0: it has been for so long.
    """

    ticker: str
    many: int
    first: float


class Timetable(ABC):
    """
    When time alone opens keys.

    A key is due when it may be granted without a release: a rest or an operator's limit ends, a
    rate allows the next start. A process that learns of that from the store has it noted; of all
    workers' main processes one is the ticker, which looks at each key when it is due. What was not
    noted, because a process died in between, a sweep finds.
    """

    @abstractmethod
    def note_due(self, dues: Mapping[str, float]) -> None:
        """
        Note in how many seconds keys, by slot names, are due; a ticker that sleeps is called.

        If a key is noted already, the earlier time counts. Does not raise: what is not noted is
        found by a sweep.
        """

    @abstractmethod
    def claim_due(
        self, who: str, inbox: Inbox, seconds: float, settled: Settled = NO_CLAIM
    ) -> Claim:
        """
        Become or remain the ticker for *seconds*, and claim what is due. One attempt.

        Args:
            who: The ticker, one word.
            inbox: Where it is called when something is due earlier than what was known.
            seconds: 0: give it up.
            settled: What has come of the claim before.
        """

    @abstractmethod
    def ticker_inbox(self, who: str) -> Inbox:
        """Return where the ticker waits."""

    @abstractmethod
    def dues(self) -> Dues:
        """Look at what is noted, without changing it."""


class Sent(enum.Enum):
    """What became of a run that was sent."""

    GO = "go"  # its key is reserved for it: the caller publishes its message
    QUEUED = "queued"  # it is in the store, and there is nothing more to do
    LATER = "later"  # the same, and it joins the queue when its delay is over
    UPDATED = "updated"  # the same: it was there, and has this envelope now
    CHANGED = "changed"  # nothing was done: another run has its identity than was thought


class SendReply(NamedTuple):
    """The answer to `Calls.send`; `wake` is what the request has woken, as a release does."""

    sent: Sent
    wake: WokenTask | None = None


class Where(enum.Enum):
    """Where a run is that has an identity."""

    WAITING = "waiting"  # in the queue, or until its delay is over
    COMING = "coming"  # dispatched; or it has been, and waits again
    RUNNING = "running"
    ENDED = "ended"  # or unknown; its time is not over


class Bearer(NamedTuple):
    """
    The run that has an identity.

    Attributes:
        run: The run.
        where: Where it is.
        expires: In how many seconds it loses the identity if it has not begun.
        silent: Its result is not stored.
        fixed: Its message may not be replaced.
        lasts: Seconds for which it has it still, whatever becomes of it.
    """

    run: str
    where: Where
    expires: float = math.inf
    silent: bool = False
    fixed: bool = False
    lasts: float = 0.0


class Calls(ABC):
    """
    Calls that go through the store, before there is a message of theirs anywhere.

    From the answer on the store has the run, as if it were parked. One that is answered ``GO`` is
    dispatched: the caller publishes its envelope, and says so by `Parking.mark_published`; if the
    caller dies or cannot, a sweep sends it.
    """

    @abstractmethod
    def send(self, request: SendRequest) -> SendReply:
        """
        Reserve the key for a run, or have it join the end of the queue, or wait for its time.

        A run that waits, is dispatched, or has the key is not taken in again, and its first
        envelope counts: ``QUEUED`` is the answer then, or what was answered first.
        """

    @abstractmethod
    def peek(self, key: str, identity: str) -> Bearer | None:
        """Return the run that has an identity; None: none has. One attempt; changes nothing."""

    @abstractmethod
    def inherit(self, key: str, identity: Identity, run: str) -> None:
        """
        Have *run* have the identity that an earlier execution of its task had.

        Nothing is changed if another task has it.
        """

    @abstractmethod
    def bearers(self, key: str, limit: int = 100) -> dict[str, Bearer]:
        """
        Return the runs that have identities, by these: at most *limit*, in no order.

        Only `run` and `where` are known of them.
        """

    @abstractmethod
    def delayed(self, key: str, *, first: int = 0, limit: int = 100) -> list[Waiter]:
        """
        Return what joins the queue of *key* later, from number *first* on, the earliest first.

        A run that has come by a message meanwhile may be numbered, and is left out: so there may be
        more behind fewer than *limit*, and behind none. No number is as high as `KeyState.later`,
        or as 50, if that is more.

        Without their envelopes; `Waiter.due` says when.
        """


class Units(ABC):
    """
    The units of a key, which several requests may hold, each with a weight.

    One admission decides: an exclusive request needs that there is no other holder; any other, that
    the units in use and its own are not more than the capacity that it names, or than an operator's
    limit. The queue is strict: no request overtakes an earlier one, even if it would fit, so none
    starves. What several give up goes to as many as fit.
    """

    @abstractmethod
    def upgrade(self, key: str, owner: str, lease: float, inbox: Inbox | None = None) -> Reply:
        """
        Give *owner*, which shares the key, all of it; may be repeated.

        ``GRANTED``: with a new token. ``BUSY``: there are other holders; with an *inbox* it now
        waits before all that queue, nothing is granted, and it is called when the last of the
        others has left: then it asks again. ``DEADLOCK``: another holder waits so already.
        ``FREE``: the key is not its own (any more).
        """

    @abstractmethod
    def downgrade(self, key: str, owner: str, lease: float) -> Reply:
        """
        Have *owner* share what it had exclusively; without a gap in which another has it.

        It has as many units, and the slot, as before its :meth:`upgrade`; if it was exclusive from
        the beginning, one unit of any number.

        Never refused: ``GRANTED`` with the token of what is shared from now on, and what fits is
        woken. ``FREE``: the key is not its own (any more). If it waits in `upgrade`, it waits no
        more, and has what it had: with ``GRANTED`` and the token of that.
        """

    @abstractmethod
    def rest(self, key: str, owner: str, seconds: float) -> bool:
        """
        Grant nothing for *seconds* from now; those that have the key go on.

        False: it is not *owner*'s (any more).
        """

    @abstractmethod
    def set_limit(self, key: str, limit: Limit | None) -> Release:
        """Set an operator's limit, or take it back; what fits then is woken. It sets `since`."""
