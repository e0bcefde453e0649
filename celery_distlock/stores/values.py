"""What stores take and return: amounts, outcomes, holders, waiters, snapshots, parked tasks."""

import enum
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import NamedTuple, Self

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import is_resting
from celery_distlock.rate import Rate

from .holders import Asked, HoldInfo, holds_of
from .holders import Holder as HolderName

__all__ = [
    "ALONE",
    "FIRST",
    "MOST_HOLDERS",
    "MOST_SLOTS",
    "UNREADABLE",
    "Ability",
    "Action",
    "Completion",
    "Destinations",
    "Holder",
    "KeyState",
    "Limit",
    "OwnChannel",
    "Ownership",
    "ParkRequest",
    "PeerChannel",
    "Release",
    "RenewOutcome",
    "Reply",
    "Route",
    "Sending",
    "Starts",
    "Status",
    "Waiter",
    "Want",
    "WokenTask",
    "read_rates",
    "write_rates",
]

MOST_SLOTS = 1024  # the largest capacity whose units are numbered
MOST_HOLDERS = 100  # holders that a snapshot of a key lists
UNREADABLE = -1  # the token of a holder whose record was damaged by another program


class Ability(enum.Enum):
    """What a store can do beyond a plain lock. Policies declare which of these they need."""

    __hash__ = object.__hash__  # Enum's is a Python function, and each release comes here

    SHARE = "be seen by other processes"
    RECOGNISE = "recognise a task that has ended when its message comes again"
    SEVERAL = "let several hold a key"
    LIST = "list its keys and their waiters"
    COUNT = "add up counters"
    QUEUE = "keep tasks until the key is free, and count its units and starts"
    RECALL = "ask a holder to leave"


class Want(NamedTuple):
    """
    How much of a key a request asks for.

    Each request is judged by its own capacity. An operator's limit takes precedence over it. A
    lower capacity, of a later request or of a limit, never revokes what was granted before.

    Attributes:
        units: Number of units. More than the capacity count as all of it.
        capacity: Units that the key has, for this request. 1: exclusive; 0: any number.
        rates: How often the key may be taken, for this request. The starts of all requests with
            rates count.
        cost: Number of starts that this request counts as.
        lane: The lane of the queue in which the request waits; None: the queue's order.
        share: The lane's share of the units, in thousandths of that of a request without a lane.
        most: The number of units that requests of the lane with a `most` may have; 0: any number.
        ahead: Milliseconds by which it waits as if it had come earlier.
        strict: Whether it is not passed once it was dispatched.
    """

    units: int = 1
    capacity: int = 1
    rates: tuple[Rate, ...] = ()
    cost: int = 1
    lane: str | None = None
    share: int = 1000
    most: int = 0
    ahead: int = 0
    strict: bool = False

    @property
    def has_order(self) -> bool:
        """Whether it does not simply wait in the order of arrival."""
        return self.lane is not None or self.ahead > 0 or self.strict

    @property
    def alone(self) -> bool:
        """Whether the request is exclusive, so that no other holder is allowed."""
        return self.capacity == 1

    @property
    def needs(self) -> Ability | None:
        """The ability that a store needs to grant this, or None if a plain lock is enough."""
        if self.rates or self.has_order or not (self.alone or self.units == 1):
            return Ability.QUEUE
        return None if self.alone else Ability.SEVERAL

    def counted(self, capacity: int = 0) -> int:
        """Return how many units a store counts, at most *capacity* if that is not 0."""
        most = [each for each in (self.capacity, capacity) if each]
        return max(1, min([self.units, *most]))

    def written(self) -> str:
        """Return the text that stores keep of this."""
        amount = f"{self.units}/{self.capacity}"
        if self.rates:
            amount = f"{amount}/{self.cost}:{write_rates(self.rates)}"
        amount += f"+{self.ahead}" if self.ahead else ""
        amount += "!" if self.strict else ""
        if self.lane is None:
            return amount
        terms = f"{self.share}:{self.most}" if self.most else f"{self.share}"
        return f"{amount}@{terms}/{slot_name(self.lane)}"

    @classmethod
    def read(cls, written: str) -> Self | None:
        """Parse the text of :meth:`written`; None if it is malformed."""
        parts = _WRITTEN.fullmatch(written)
        if parts is None:
            return None
        units, capacity, cost, rates, ahead, strict, share, most, lane = parts.groups()
        amount, more = (int(units), int(capacity)), (int(ahead or 0), bool(strict))
        terms = (None, 1000, 0) if lane is None else (key_of(lane), int(share), int(most or 0))
        order = *terms, *more
        if not cost:
            return cls(*amount, (), 1, *order)
        read = read_rates(rates)
        return cls(*amount, read, int(cost), *order) if read else None


_RATES = r"(?:\d{1,9},\d{1,15},\d{1,9};?){1,9}(?<!;)"
_ORDER = r"(?:\+(\d{1,10}))?(!?)(?:@(\d{1,9})(?::(\d{1,9}))?/([^ ]*))?"
_WRITTEN = re.compile(rf"(\d{{1,9}})/(\d{{1,9}})(?:/(\d{{1,9}}):({_RATES}))?{_ORDER}")


def write_rates(rates: Iterable[Rate]) -> str:
    """Return the text that stores keep of *rates*."""
    return ";".join(f"{rate.limit},{rate.microseconds},{rate.burst}" for rate in rates)


def read_rates(written: str) -> tuple[Rate, ...]:
    """Parse the text of :func:`write_rates`; empty if it is malformed."""
    if not re.fullmatch(_RATES, written):
        return ()
    terms = [map(int, rate.split(",")) for rate in written.split(";")]
    try:
        return tuple(Rate(limit, per / 1e6, burst) for limit, per, burst in terms)
    except ConfigurationError:
        return ()


ALONE = Want()
FIRST = 1  # µs: the arrival of a request that must precede all others


class Limit(NamedTuple):
    """
    An operator's limit for one key, or for one of its lanes, which overrides what requests name.

    Attributes:
        capacity: Units that may be in use; 0: no request is admitted; None: as requests name.
        until: When the limit ends, in seconds since the epoch by the store's clock; 0: when an
            operator removes it.
        author: The operator that has set it.
        since: When it was set, in seconds since the epoch by the store's clock.
        rates: How often the key may be taken, in place of requests' rates; empty: as requests
            name. A cost above a rate's number of starts counts as all of them. A lane has none.
    """

    capacity: int | None
    until: float = 0.0
    author: str = ""
    since: float = 0.0
    rates: tuple[Rate, ...] = ()

    @property
    def pauses(self) -> bool:
        """Whether no request is admitted."""
        return self.capacity == 0


class Starts(NamedTuple):
    """
    How often a key with a rate was taken recently.

    Attributes:
        limit: Starts allowed in `per` seconds, by the latest request.
        per: Seconds.
        begun: Starts in the last `per` seconds.
    """

    limit: int
    per: float
    begun: int


class Holder(NamedTuple):
    """
    One of several holders of a key.

    Attributes:
        owner: As in the request; ``parked:…`` for a run that has not claimed its reservation yet,
            or for a key that rests.
        run: As in the request; may be empty.
        units: Number of units that it holds.
        slot: The number of its unit, see `Reply`; -1: none.
        since: When it was granted, in seconds since the epoch by the store's clock.
        remaining: Seconds until its lease ends.
        task: The name of a dispatched task, where known.
        asked: When it was asked to leave, and by what.
    """

    owner: str
    run: str
    units: int
    slot: int
    since: float
    remaining: float
    task: str = ""
    asked: Asked = Asked()


class Lane(NamedTuple):
    """
    A lane of a key's queue.

    Attributes:
        name: Its name; empty for waiters that have asked for none.
        waiting: The number of its waiters.
        share: Its share of the units, for its next waiter.
        most: The number of units that it may have, for its next waiter; 0: any number.
        used: The number of units that it has of a shared key.
    """

    name: str
    waiting: int
    share: float
    most: int = 0
    used: int = 0


class Action(NamedTuple):
    """
    An operator's action on a key, requested or done.

    Attributes:
        name: ``release``, ``recall``, ``drop``, ``wake``, ``limit``, ``pause`` or ``resume``.
        author: The operator, as ``user@host``.
        reason: The operator's reason; empty if none was given.
        about: What the action applies to, or the terms of a limit, as text for people.
        owners: The owners that lose the key, or are asked to leave.
        at: When, in seconds since the epoch by the store's clock; 0: not yet.
    """

    name: str
    author: str = ""
    reason: str = ""
    about: str = ""
    owners: tuple[str, ...] = ()
    at: float = 0.0

    @property
    def loss(self) -> str:
        """Why the owners lost the key, or are asked to leave, for errors and log lines."""
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds")
        verb = "asked to leave" if self.name == "recall" else "taken"
        return f"{verb} by {self.author} at {at}{self.reason and f': {self.reason}'}"


class Status(enum.Enum):
    """The outcome of a request for a key."""

    GRANTED = "granted"
    BUSY = "busy"
    PARKED = "parked"
    DONE = "done"  # the run has ended; this is a second delivery of it
    RECALLED = "recalled"  # the run was asked to leave, and its process has died; as above
    FREE = "free"  # the key has no holder, and nothing was done
    FULL = "full"  # as many wait as the request allows, and nothing was done
    RESERVED = "reserved"  # all of its keys are reserved for the run
    DEADLOCK = "deadlock"  # another holder already waits to upgrade to exclusive, as this one would


class Sending(enum.Enum):
    """The outcome of sending a woken run."""

    SENT = "sent"
    LEFT = "left to a sweep, here or elsewhere"
    PENDING = "sent later, or left to a sweep if that takes long"


class RenewOutcome(enum.Enum):
    """
    The outcome of a renewal. After ``UNKNOWN``, the hold lasts until its lease ends.

    ``RECALLED``: it is renewed, and its holder is asked to leave.
    """

    RENEWED = "renewed"
    RECALLED = "renewed, and asked to leave"
    HELD = "held by another owner"
    LOST = "gone"
    UNKNOWN = "the store did not answer"

    @property
    def is_held(self) -> bool:
        """Whether the lease was extended."""
        return self in (RenewOutcome.RENEWED, RenewOutcome.RECALLED)


class Completion(enum.Enum):
    """
    Whether the run that releases a key has ended.

    ``UNSETTLED``: its body has ended, but its result is not stored yet. A second delivery is held
    back until `Store.drop` confirms the end. If that call never comes, it executes later.
    """

    NO = "0"
    YES = "1"
    YES_AND_MAY_COME_AGAIN = "2"
    UNSETTLED = "3"


class Route(NamedTuple):
    """
    The keys of a run that needs several, by their slot names; its task and destination for display.

    The keys are in the order in which they are taken, which is the same for all runs. The envelope
    is kept at the first key. `wants` is how much of each; empty: all keys exclusively.
    """

    names: tuple[str, ...]
    task: str = ""
    wants: tuple[Want, ...] = ()
    destination: str = ""

    def want(self, name: str) -> Want:
        """Return how much the run wants of the key *name*."""
        return self.wants[self.names.index(name)] if self.wants else ALONE

    def written(self) -> str:
        """Return the text that stores keep of this."""
        wants = " ".join(want.written() for want in self.wants)
        lines = [" ".join(self.names), self.task, wants, self.destination]
        while len(lines) > 2 and not lines[-1]:
            lines.pop()
        return "\n".join(lines)

    @classmethod
    def read(cls, written: str) -> "Route":
        """Parse the text of :meth:`written`."""
        names, task, wants, destination, *_ = [*written.split("\n"), "", "", ""]
        read = tuple(Want.read(want) or ALONE for want in wants.split())
        return cls(tuple(names.split(" ")), task, read, destination)


class WokenTask(NamedTuple):
    """
    A parked run whose turn has come. The receiver sends it, then calls `mark_published`.

    With a `route`, the envelope is empty and the run may need more keys: pass it to
    :func:`celery_distlock.stores.queue_store.ready`. If one request wakes several runs, the others
    are in `also`, and must be sent as well.

    Attributes:
        name: The key's slot name.
        run: The execution's id.
        envelope: Its message.
        route: All of its keys, if it needs several.
        arrival: When the run came (µs, by the store's clock) if it was pushed to a worker; else 0.
        givers: The runs that released its keys, if it was pushed to a worker, as far as known.
        also: The other runs that were woken.
        returned: It has claimed its key before, and has not ended, as far as known.
        published: The broker was given its message, and the run has not claimed its key.
    """

    name: str
    run: str
    envelope: bytes
    route: Route | None = None
    arrival: int = 0
    givers: tuple[str, ...] = ()
    also: tuple["WokenTask", ...] = ()
    returned: bool = False
    published: bool = False


class Reply(NamedTuple):
    """
    The answer to a request for a key.

    `asked_at` is the local clock (see :mod:`celery_distlock.clock`) just before the request was
    sent: a lease counts from there, never from the reply. `arrival` is when a waiter came (µs, by
    the store's clock), to pass to `Store.acquire`; 0 if that does not matter.

    `due` is the number of seconds after which time alone admits the caller, if no other request
    comes before it; 0: time alone does not admit it. A waiter gets it only if it is first in the
    queue.

    `at` is the slot name of the key at which a run of several keys waits.

    If a key is shared, all of its holders have the same `token`, as long as the key is held without
    a gap; `holder` is one of them. `slot`, from 0, is the number of the unit that was granted, if
    the request was for one unit of a capacity up to `MOST_SLOTS`: no other holder has that number
    at the same time. For all other requests it is -1.

    `is_open` is true if a run was parked although the key is open to it: no release wakes it.

    `for_time` is true if a caller that is first waits for time alone, or for the end of a pause.
    `waited_for`, of a grant, is what the run waited for last, ``time`` or ``holder``; empty: it did
    not wait, or the store does not know.
    """

    status: Status
    asked_at: float
    token: int = 0
    holder: str = ""
    holder_run: str = ""
    remaining: float = 0.0
    place: int = 0
    wake: WokenTask | None = None
    arrival: int = 0
    slot: int = -1
    due: float = 0.0
    at: str = ""
    is_open: bool = False
    for_time: bool = False
    waited_for: str = ""

    @property
    def waits_for(self) -> str:
        """``time`` or ``holder``: what a caller that was refused waits for."""
        rests = is_resting(self.holder) and not self.place
        return "time" if self.for_time or rests else "holder"

    @property
    def wait(self) -> float | None:
        """Seconds until time alone admits the caller; None if time alone does not."""
        left = self.due or (self.remaining if is_resting(self.holder) else 0.0)
        return max(0.0, left - (clock.monotonic() - self.asked_at)) if left else None


class Release(NamedTuple):
    """The answer to a release; `released` is false if the owner did not hold the key (by then)."""

    released: bool
    wake: WokenTask | None = None


class Ownership(NamedTuple):
    """One hold to renew."""

    key: str
    owner: str
    lease: float


class KeyState(NamedTuple):
    """
    A snapshot of one key; `token` is 0 if it has no holder.

    If it has a holder and its record has no valid token, the token is `UNREADABLE` and `since` 0.
    If holders share it, `owner`, `run`, `since` and `remaining` are those of one of them.

    Attributes:
        holders: The holders that share it, at most `MOST_HOLDERS` of them.
        used: Units that all of them hold.
        capacity: The capacity named by the request that was granted last; 0: any number.
        limit: The operator's limit.
        lane_limits: The operator's limits of its lanes, each with the lane.
        rest: Seconds for which no request is admitted.
        starts: How often the key was taken, for each rate.
        later: Number of runs that join the queue later. Above 50, it may include runs that have
            arrived by their own message.
        due: Seconds until the first of these runs joins the queue.
        opens: Seconds until time alone admits the first waiter; None: time alone does not. If there
            is none, it is that of `Store.inspect_for`'s request.
        identities: Number of calls that have an identity, see `Calls.bearers`. Above 50, it may
            include some that are no longer valid.
        asked: When the exclusive holder was asked to leave, and by what.
        key: The key, as shown to operators; empty in snapshots that come from a store.
        elsewhere: The keys that its runs of several keys wait for, by owner. Only `Admin.show`
            fills it.
    """

    owner: str
    token: int
    run: str
    since: float  # seconds since the epoch, by the store's clock
    remaining: float
    waiting: int
    oldest: float = 0.0  # when the first waiter came, as far as known; 0: there is none
    woken: int = 0  # parked runs that are dispatched
    task: str = ""  # the name of the task that the key is reserved for, where known
    holders: tuple[Holder, ...] = ()
    used: int = 0
    capacity: int = 1
    limit: Limit | None = None
    rest: float = 0.0
    starts: tuple[Starts, ...] = ()
    later: int = 0
    due: float = 0.0
    opens: float | None = None
    identities: int = 0
    asked: Asked = Asked()
    key: str = ""
    elsewhere: "tuple[tuple[str, KeyState], ...]" = ()
    lane_limits: tuple[tuple[str, Limit], ...] = ()

    @property
    def holds(self) -> tuple[HoldInfo, ...]:
        """What each holder holds, by state, ``held`` first, then by time of the grant."""
        lasting = self.since, self.remaining
        return holds_of(self, Holder(self.owner, self.run, 1, -1, *lasting, asked=self.asked))

    @property
    def holder(self) -> HolderName | None:
        """The holder; of several, the one that has held the key longest."""
        return self.holds[0].who if self.token else None

    @property
    def state(self) -> str:
        """As `HoldInfo.state`; or ``free``."""
        return self.holds[0].state if self.token else "free"

    @property
    def mode(self) -> str:
        """``exclusive``, ``shared`` if others may join, empty if free."""
        return ("shared" if self.holders else "exclusive") if self.token else ""

    @property
    def units(self) -> int:
        """Units that all holders hold."""
        return max(self.used, sum(hold.units for hold in self.holds))

    @property
    def most(self) -> int | None:
        """Units that may be in use, by an operator's limit if there is any; None for any number."""
        if self.limit is not None and self.limit.capacity is not None:
            return self.limit.capacity
        return self.capacity or None

    @property
    def paused(self) -> bool:
        """Whether an operator has paused the key, so that no request is admitted."""
        return self.limit is not None and self.limit.pauses

    def limit_of(self, lane: str | None) -> Limit | None:
        """Return the operator's limit of a lane; None: that of the key."""
        return self.limit if lane is None else dict(self.lane_limits).get(lane)

    @property
    def is_limited(self) -> bool:
        """Whether an operator has limited or paused the key, or one of its lanes."""
        return bool(self.limit or self.lane_limits)

    @property
    def has_waiters(self) -> bool:
        """Whether something waits, is dispatched, or joins the queue later."""
        return bool(self.waiting or self.woken or self.later)

    @property
    def is_in_use(self) -> bool:
        """Whether it has a holder, a waiter, a limit, a rest, counted starts or known calls."""
        waits = self.has_waiters or self.identities
        return bool(self.token or waits or self.is_limited or self.rest > 0 or self.starts)

    @property
    def may_open_sooner(self) -> bool:
        """Whether the first waiter may be admitted before `opens`, if holders end earlier."""
        if self.opens is None or not self.token or self.paused or self.rest > 0:
            return False
        is_full = self.most is not None and self.units >= self.most
        has_rates = bool(self.starts or (self.limit and self.limit.rates))
        return self.mode == "shared" and (is_full or not has_rates)

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that hold the key, or that it is reserved for, as far as they are listed."""
        return (self.run, *(holder.run for holder in self.holders))


class Waiter(NamedTuple):
    """
    A waiter of a key: blocked as `owner`, or parked as `run`.

    The envelope, which may be large, comes from `Store.parked` alone.
    """

    owner: str
    run: str
    since: float  # seconds since the epoch, by the store's clock; 0: unknown
    envelope: bytes = b""
    woken: bool = False  # its turn has come, and it is dispatched
    task: str = ""  # the parked task's name, where known
    route: Route | None = None  # all of its keys; its envelope is at the first of them
    want: Want = ALONE
    due: float | None = None  # seconds until it joins the queue; None: it waits already
    at: str = ""  # at the first of several keys: the slot name of the key where it waits instead
    leaves: float | None = None  # seconds until it leaves the queue if it still waits, where known


class Destinations(NamedTuple):
    """
    How many runs of a key wait, are dispatched, or join its queue later, by destination.

    The destination is empty for blocked waiters, and where it is not known. Of many runs, only some
    are counted: what matters is their shares.
    """

    waiting: Mapping[str, int] = MappingProxyType({})
    woken: Mapping[str, int] = MappingProxyType({})
    later: Mapping[str, int] = MappingProxyType({})


class ParkRequest(NamedTuple):
    """
    What to keep of a task whose key is taken: opaque bytes, to be sent when its turn comes.

    `channel` is the address of a delivery channel. If it is still open when the turn comes, the
    bytes are pushed to it. The task's name is kept for display in the queue. `destination` is any
    text that names where the broker would deliver the bytes; waiters are counted by it. What is
    given to `Calls.send` may be pushed to a worker that consumes from there, see
    :class:`OwnChannel`. If `max_waiting` or more wait at the key, a run that the store does not
    know is not queued; 0: any number may wait. After `leaves` seconds a run that still waits is
    dispatched, though nothing is reserved for it; None: never.
    """

    envelope: bytes
    channel: str = ""
    task: str = ""
    destination: str = ""
    max_waiting: int = 0
    leaves: float | None = None


class OwnChannel(NamedTuple):
    """
    The delivery channel of the worker that releases a key and is about to have a free slot.

    A waiter of the key that came by no channel and has this destination is pushed there.
    """

    address: str
    destination: str


class PeerChannel(NamedTuple):
    """A worker that takes woken runs at its delivery channel, past the broker."""

    address: str
    free: int  # number of tasks that it could start now
