"""What stores answer: states, outcomes, who holds and who waits; and what is parked at them."""

import enum
from typing import NamedTuple

__all__ = [
    "UNREADABLE",
    "Ability",
    "Completion",
    "KeyState",
    "Ownership",
    "ParkRequest",
    "PeerChannel",
    "Release",
    "RenewOutcome",
    "Reply",
    "Route",
    "Sending",
    "Status",
    "Waiter",
    "WokenTask",
]

UNREADABLE = -1  # in a token's place, of one who has the key: somebody else has spoilt its record


class Ability(enum.Enum):
    """What a store can do beyond the plain lock; a policy that needs one says so when declared."""

    WAIT = "let callers block until the key is theirs"
    PARK = "keep tasks until the key is free"
    RECOGNISE = "recognise a task that has ended when its message comes again"
    SHARE = "be seen by other processes"
    LIST = "list its keys and who waits for them"
    COUNT = "add up what is counted"


class Status(enum.Enum):
    """What became of a request for a key."""

    GRANTED = "granted"
    BUSY = "busy"
    PARKED = "parked"
    DONE = "done"  # the run has ended before; this is a second delivery of it
    FREE = "free"  # nobody holds the key, and nothing was done
    RESERVED = "reserved"  # the key is kept for the run, which needs others, too


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
    envelope.
    """

    names: tuple[str, ...]
    task: str = ""

    def written(self) -> str:
        """Return it as a store keeps it."""
        return " ".join(self.names) + "\n" + self.task

    @classmethod
    def read(cls, written: str) -> "Route":
        """Return what :meth:`written` has made."""
        names, _, task = written.partition("\n")
        return cls(tuple(names.split(" ")), task)


class WokenTask(NamedTuple):
    """
    A parked run whose turn it is. Whoever is given one sends its envelope, then says `sent`.

    If there is a route, it comes without one, and may need more keys: it is for `Store.ready`.

    Attributes:
        name: The key's slot name.
        run: The execution's id.
        envelope: Its message.
        route: What else it needs.
        arrival: Where it was pushed to a worker: when it came (µs, by the store's clock); else 0.
        givers: Likewise, the runs that gave its keys up for it, as far as that is known.
    """

    name: str
    run: str
    envelope: bytes
    route: Route | None = None
    arrival: int = 0
    givers: tuple[str, ...] = ()


class Reply(NamedTuple):
    """
    The answer to a request for a key.

    `asked_at` is the local clock (see :mod:`celery_distlock.clock`) just before the request was
    sent: a lease is believed from there, never from the reply. `arrival` is when one who waits has
    come (µs, by the store's clock), for `Store.acquire`; 0 if that does not matter.
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
    A look at one key; `token` is 0 if nobody holds it.

    If somebody does, and the record does not tell the token, that is `UNREADABLE`, and `since` 0.
    """

    owner: str
    token: int
    run: str
    since: float  # seconds since the epoch, by the store's clock
    remaining: float
    waiting: int
    oldest: float = 0.0  # when the first of those who wait came, likewise; 0: nobody waits
    woken: int = 0  # parked runs on their way
    task: str = ""  # the name of the task that the key is kept for, where it is known

    @property
    def waking(self) -> bool:
        """Whether the key is kept for a parked run that is on its way to it."""
        return self.owner.startswith("parked:")


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
    route: Route | None = None  # where else it stands; its envelope is at the first of those keys


class ParkRequest(NamedTuple):
    """
    What to keep of a task that finds its key taken: opaque bytes, sent when its turn comes.

    If `channel`, the address of a delivery channel, is still attended then, they are pushed
    there. The task's name is kept beside them, for those who look at the queue.
    """

    envelope: bytes
    channel: str = ""
    task: str = ""


class PeerChannel(NamedTuple):
    """A worker that takes woken runs at its delivery channel, past the broker."""

    address: str
    free: int  # so many more tasks it could start now
