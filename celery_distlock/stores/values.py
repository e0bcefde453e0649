"""What stores answer: states, outcomes, who holds and who waits; and what is parked at them."""

import enum
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple, Self

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError
from celery_distlock.naming import is_resting
from celery_distlock.rate import Rate

from .holders import Holder as HolderName
from .holders import HoldInfo, holds_of

__all__ = [
    "ALONE",
    "FIRST",
    "MOST_HOLDERS",
    "MOST_SLOTS",
    "UNREADABLE",
    "Ability",
    "Action",
    "Completion",
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

MOST_SLOTS = 1024  # of a capacity, whose units are told from each other
MOST_HOLDERS = 100  # that a look at a key tells of
UNREADABLE = -1  # in a token's place, of one who has the key: somebody else has spoilt its record


class Ability(enum.Enum):
    """What a store can do beyond the plain lock; a policy that needs one says so when declared."""

    SHARE = "be seen by other processes"
    RECOGNISE = "recognise a task that has ended when its message comes again"
    SEVERAL = "let several hold a key"
    LIST = "list its keys and who waits for them"
    COUNT = "add up what is counted"
    QUEUE = "keep tasks until the key is free, and count its units and starts"


class Want(NamedTuple):
    """
    How much of a key is asked for.

    Each request is judged by its own capacity, an operator's limit goes before it. Nothing that was
    granted is taken back because a later request, or a limit, has a lower one.

    Attributes:
        units: How many; more than the capacity count as all of it.
        capacity: How many units there are, as far as this request is concerned; 1: it is alone,
            beside no other; 0: any number.
        rates: How often the key may be taken, as far as this request is concerned: by all that
            have rates there.
        cost: How many starts this one counts as.
    """

    units: int = 1
    capacity: int = 1
    rates: tuple[Rate, ...] = ()
    cost: int = 1

    @property
    def alone(self) -> bool:
        """Whether nobody else may hold the key then."""
        return self.capacity == 1

    @property
    def needs(self) -> Ability | None:
        """What a store must be able to do to grant it, if anything beyond a lock."""
        if self.rates or not (self.alone or self.units == 1):
            return Ability.QUEUE
        return None if self.alone else Ability.SEVERAL

    def counted(self, capacity: int = 0) -> int:
        """Return how many units a store counts; of a *capacity* of others, if not 0."""
        most = [each for each in (self.capacity, capacity) if each]
        return max(1, min([self.units, *most]))

    def written(self) -> str:
        """Return it as a store keeps it."""
        amount = f"{self.units}/{self.capacity}"
        return f"{amount}/{self.cost}:{write_rates(self.rates)}" if self.rates else amount

    @classmethod
    def read(cls, written: str) -> Self | None:
        """Return what :meth:`written` has made; None: it is something else."""
        parts = _WRITTEN.fullmatch(written)
        if parts is None:
            return None
        units, capacity, cost, rates = parts.groups()
        amount = int(units), int(capacity)
        if not cost:
            return cls(*amount)
        read = read_rates(rates)
        return cls(*amount, read, int(cost)) if read else None


_RATES = r"(?:\d{1,9},\d{1,15},\d{1,9};?){1,9}(?<!;)"
_WRITTEN = re.compile(rf"(\d{{1,9}})/(\d{{1,9}})(?:/(\d{{1,9}}):({_RATES}))?")


def write_rates(rates: Iterable[Rate]) -> str:
    """Return *rates* as a store keeps them."""
    return ";".join(f"{rate.limit},{rate.microseconds},{rate.burst}" for rate in rates)


def read_rates(written: str) -> tuple[Rate, ...]:
    """Return what :func:`write_rates` has made; nothing: it is something else."""
    if not re.fullmatch(_RATES, written):
        return ()
    terms = [map(int, rate.split(",")) for rate in written.split(";")]
    try:
        return tuple(Rate(limit, per / 1e6, burst) for limit, per, burst in terms)
    except ConfigurationError:
        return ()


ALONE = Want()
FIRST = 1  # µs: when one came before whom nobody is to go


class Limit(NamedTuple):
    """
    What an operator has set for one key, whatever is asked with.

    Attributes:
        capacity: So many units; 0: nobody enters; None: as many as are asked with.
        until: When it ends, in seconds since the epoch by the store's clock; 0: when it is taken
            back.
        author: Who has set it.
        since: When, likewise.
        rates: How often the key may be taken, instead of what is asked with; empty: as is asked
            with. What counts as more starts than that counts as all of them.
    """

    capacity: int | None
    until: float = 0.0
    author: str = ""
    since: float = 0.0
    rates: tuple[Rate, ...] = ()

    @property
    def pauses(self) -> bool:
        """Whether nobody enters."""
        return self.capacity == 0


class Starts(NamedTuple):
    """
    How often a key that has a rate was taken of late.

    Attributes:
        limit: How often it may be in such a time, as it was last asked for.
        per: Seconds.
        begun: How often it was, in the last so many seconds.
    """

    limit: int
    per: float
    begun: int


class Holder(NamedTuple):
    """
    One of several who hold a key.

    Attributes:
        owner: As in the request; ``parked:…`` of a run that has not come for it yet, or of nobody
            where it rests.
        run: Likewise, or empty.
        units: How many it has.
        slot: Which of them, see `Reply`; -1: none of its own.
        since: When it was granted, in seconds since the epoch, by the store's clock.
        remaining: Seconds until its lease ends.
        task: The name of a task that is on its way, where it is known.
    """

    owner: str
    run: str
    units: int
    slot: int
    since: float
    remaining: float
    task: str = ""


class Action(NamedTuple):
    """
    What an operator does, or has done, to a key.

    Attributes:
        name: ``release``, ``drop``, ``wake``, ``limit``, ``pause`` or ``resume``.
        author: The operator, as ``user@host``.
        reason: Why, as the operator says; empty where that is not said.
        about: What it is done to, or the terms of a limit, in words.
        owners: The owners that lose the key.
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
        """Why the owners have lost the key, for errors and log lines."""
        at = datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds")
        return f"taken by {self.author} at {at}{self.reason and f': {self.reason}'}"


class Status(enum.Enum):
    """What became of a request for a key."""

    GRANTED = "granted"
    BUSY = "busy"
    PARKED = "parked"
    DONE = "done"  # the run has ended before; this is a second delivery of it
    FREE = "free"  # nobody holds the key, and nothing was done
    RESERVED = "reserved"  # all of its keys are reserved for the run
    DEADLOCK = "deadlock"  # another one who shares the key waits for having it alone, as this one


class Sending(enum.Enum):
    """What became of sending a woken run."""

    SENT = "sent"
    LEFT = "left to a sweep, here or elsewhere"
    PENDING = "sent later, or left to a sweep if that takes long"


class RenewOutcome(enum.Enum):
    """What became of a renewal. Only ``UNKNOWN`` leaves hope, and only until the lease's end."""

    RENEWED = "renewed"
    HELD = "held by somebody else"
    LOST = "gone"
    UNKNOWN = "the store did not answer"


class Completion(enum.Enum):
    """
    Whether the run that gives a key up is over.

    ``UNSETTLED``: its body is, and its result is not stored yet. A second delivery is held back
    until `Store.drop` says that the end is known to all; if that does not come, it runs.
    """

    NO = "0"
    YES = "1"
    YES_AND_MAY_COME_AGAIN = "2"
    UNSETTLED = "3"


class Route(NamedTuple):
    """
    The keys of a run that needs several, by their slot names, and its task's name.

    In the order in which they are taken, which is the same for all runs. At the first one lies its
    envelope. `wants` is how much of each; empty: all of all.
    """

    names: tuple[str, ...]
    task: str = ""
    wants: tuple[Want, ...] = ()

    def want(self, name: str) -> Want:
        """Return how much is wanted of one of them."""
        return self.wants[self.names.index(name)] if self.wants else ALONE

    def written(self) -> str:
        """Return it as a store keeps it."""
        wants = " ".join(want.written() for want in self.wants)
        return "\n".join([" ".join(self.names), self.task, *([wants] if wants else ())])

    @classmethod
    def read(cls, written: str) -> "Route":
        """Return what :meth:`written` has made."""
        names, task, wants, *_ = [*written.split("\n"), "", ""]
        read = tuple(Want.read(want) or ALONE for want in wants.split())
        return cls(tuple(names.split(" ")), task, read)


class WokenTask(NamedTuple):
    """
    A parked run whose turn it is. Who is given one sends it, then calls `mark_published`.

    If there is a route, it comes without one, and may need more keys: it is for `Store.ready`.
    Where one request has woken several, the others are `also` in it, and are to be sent as well.

    Attributes:
        name: The key's slot name.
        run: The execution's id.
        envelope: Its message.
        route: What else it needs.
        arrival: Where it was pushed to a worker: when it came (µs, by the store's clock); else 0.
        givers: Likewise, the runs that gave its keys up for it, as far as that is known.
        also: What else was woken.
        returned: It has come for its key before, and has not ended, as far as that is known.
        published: The broker was given its message, and it has not come.
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
    sent: a lease is believed from there, never from the reply. `arrival` is when one who waits has
    come (µs, by the store's clock), for `Store.acquire`; 0 if that does not matter.

    `due` is in how many seconds time alone lets the caller in, if nobody comes before; 0: it is not
    only for time to do. One who waits is told so if he is the first.

    `at` is the slot name of the key at which a run waits that needs several.

    Where several hold a key, `token` is that of the time in which it is shared without a gap, the
    same for all who do; `holder` is one of them. `slot` tells who was granted one unit of a
    capacity up to `MOST_SLOTS` which one that is, from 0: nobody else has it meanwhile; -1 for all
    others.

    `is_open` is true where a run was parked although the key is open to it: no release wakes it.
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

    @property
    def wait(self) -> float | None:
        """In how many seconds time alone lets the caller in; None if it is not for time to do."""
        left = self.due or (self.remaining if is_resting(self.holder) else 0.0)
        return max(0.0, left - (clock.monotonic() - self.asked_at)) if left else None


class Release(NamedTuple):
    """`released` is false if the key was not the owner's (any more)."""

    released: bool
    wake: WokenTask | None = None


class Ownership(NamedTuple):
    """One hold to renew."""

    key: str
    owner: str
    lease: float


class KeyState(NamedTuple):
    """
    A look at one key; `token` is 0 if it has no holder.

    If it has a holder and its record has no valid token, the token is `UNREADABLE` and `since` 0.
    If holders share it, `owner`, `run`, `since` and `remaining` are those of one of them.

    Attributes:
        holders: The holders that share it, at most `MOST_HOLDERS` of them.
        used: How many units all of them have.
        capacity: What the last one was granted it with; 0: any number.
        limit: What an operator has set.
        rest: Seconds for which nobody enters.
        starts: Of a key that has rates, how often it was taken.
        later: How many runs join the queue later; above 50 perhaps with some that have come by
            themselves.
        due: In how many seconds the first of them does.
        opens: In how many seconds time alone lets the first enter who waits; None: it does not.
        identities: How many calls are known by an identity, see `Calls.bearers`; above 50 perhaps
            some that mean nothing any longer.
        key: The key, as operators are shown it; empty where a store has looked.
        elsewhere: The keys that its runs of several keys wait for, by owner; only `Admin.show`
            looks for them.
    """

    owner: str
    token: int
    run: str
    since: float  # seconds since the epoch, by the store's clock
    remaining: float
    waiting: int
    oldest: float = 0.0  # when the first of those who wait came, as far as that is known; 0: none
    woken: int = 0  # parked runs on their way
    task: str = ""  # the name of the task that the key is kept for, where it is known
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
    key: str = ""
    elsewhere: "tuple[tuple[str, KeyState], ...]" = ()

    @property
    def holds(self) -> tuple[HoldInfo, ...]:
        """What each holder has; first those that run, the one that has had it longest first."""
        return holds_of(self, Holder(self.owner, self.run, 1, -1, self.since, self.remaining))

    @property
    def holder(self) -> HolderName | None:
        """The holder; of several, the one that has had it longest."""
        return self.holds[0].who if self.token else None

    @property
    def state(self) -> str:
        """As `HoldInfo.state`; or ``free``."""
        return self.holds[0].state if self.token else "free"

    @property
    def mode(self) -> str:
        """``alone``, or ``shared``: others may have it as well; empty if it is free."""
        return ("shared" if self.holders else "alone") if self.token else ""

    @property
    def units(self) -> int:
        """How many units all holders have."""
        return max(self.used, sum(hold.units for hold in self.holds))

    @property
    def most(self) -> int | None:
        """Return how many units may be in use, None for any number; an operator's limit counts."""
        if self.limit is not None and self.limit.capacity is not None:
            return self.limit.capacity
        return self.capacity or None

    @property
    def paused(self) -> bool:
        """Whether an operator lets no request in."""
        return self.limit is not None and self.limit.pauses

    @property
    def is_in_use(self) -> bool:
        """Whether it has a holder, a waiter, a limit or a rest, or was used by a rate or a call."""
        waits = self.waiting or self.woken or self.later or self.identities
        return bool(self.token or waits or self.limit or self.rest > 0 or self.starts)

    @property
    def may_open_sooner(self) -> bool:
        """Whether the first waiter may enter before `opens` is over, if holders end before."""
        if self.opens is None or not self.token or self.paused or self.rest > 0:
            return False
        is_full = self.most is not None and self.units >= self.most
        has_rates = bool(self.starts or (self.limit and self.limit.rates))
        return self.mode == "shared" and (is_full or not has_rates)

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs that have it, or that it is kept for, of those who are told of."""
        return (self.run, *(holder.run for holder in self.holders))


class Waiter(NamedTuple):
    """
    One that waits for a key: blocked as `owner`, or parked as `run`.

    The envelope, which may be large, comes from `Store.parked` alone.
    """

    owner: str
    run: str
    since: float  # seconds since the epoch, by the store's clock; 0: it is not known
    envelope: bytes = b""
    woken: bool = False  # its turn has come, and it is on its way
    task: str = ""  # the parked task's name, where it is known
    route: Route | None = None  # all of its keys; its envelope is at the first of them
    want: Want = ALONE
    due: float | None = None  # in how many seconds it joins the queue; None: it waits already
    at: str = ""  # at the first of several keys: the slot name of the other one where it waits


class ParkRequest(NamedTuple):
    """
    What to keep of a task that finds its key taken: opaque bytes, sent when its turn comes.

    If `channel`, the address of a delivery channel, is still attended then, they are pushed
    there. The task's name is kept beside them, for those who look at the queue. If `destination`,
    any text that names where the broker would take them, they may be pushed to a worker that
    consumes what comes there; see :class:`OwnChannel`.
    """

    envelope: bytes
    channel: str = ""
    task: str = ""
    destination: str = ""


class OwnChannel(NamedTuple):
    """
    The delivery channel of the worker that gives up a key, where a slot is about to be free.

    Of those that wait for the key, one that has come by no channel and whose destination is this
    one is pushed there.
    """

    address: str
    destination: str


class PeerChannel(NamedTuple):
    """A worker that takes woken runs at its delivery channel, past the broker."""

    address: str
    free: int  # so many more tasks it could start now
