"""What operators are shown of keys: who has them and how much of them, and who waits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from celery_distlock.errors import DistlockError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import PARKED, is_resting, printable, shown
from celery_distlock.stores.identities import Owner, task_id_of
from celery_distlock.stores.values import ALONE, KeyState, Limit, Starts, Waiter, Want
from celery_distlock.stores.values import Holder as HolderRecord

__all__ = [
    "CallInfo",
    "HoldInfo",
    "Holder",
    "LockInfo",
    "WaiterInfo",
    "holds_named",
    "is_of_interest",
    "known_time",
    "lock_info",
    "printable",
    "waiter_info",
]

MOST_LISTED = 5  # holders in a sentence
LATEST = 253_402_300_799.0  # seconds since the epoch: the year 9999 ends
_STATES = ("held", "waking", "resting")  # of a hold; a key has the first of those of its holds


@dataclass(frozen=True, slots=True)
class Holder:
    """
    Who holds a key or waits for it.

    Attributes:
        task: The task's name; of a :class:`~celery_distlock.Lock`, its thread's, and of an
            :class:`~celery_distlock.AsyncLock` that of its asyncio task.
        task_id: The task's id; empty for a ``Lock``.
        host: The host; empty while it is on its way there.
        pid: The process, 0 likewise. In a prefork pool, the child.
        owner: The name of this acquisition, as it stands in log lines.
    """

    task: str
    task_id: str
    host: str = ""
    pid: int = 0
    owner: str = ""

    @property
    def name(self) -> str:
        """What people are shown: the task's name; of a ``Lock``, ``thread`` and its name."""
        return f"thread {self.task}" if self.is_thread else self.task

    @property
    def is_thread(self) -> bool:
        """Whether it is a thread that holds a ``Lock``; no task, and nothing unreadable."""
        return bool(self.host and not self.task_id)

    def __str__(self) -> str:
        name = f"{self.task or 'task'}[{self.task_id}]" if self.task_id else self.name
        return f"{name} on {self.host}, process {self.pid}" if self.host else name

    @classmethod
    def of(cls, owner: str) -> "Holder":
        """Read the text of an :class:`~celery_distlock.stores.identities.Owner`."""
        known = Owner.parse(owner)
        if known is None:
            return cls(owner, "", owner=owner)
        return cls(known.task or owner, known.task_id, known.host, known.pid, owner)


@dataclass(frozen=True, slots=True)
class HoldInfo:
    """
    What one has of a key.

    Attributes:
        who: Who it is.
        state: ``held``; ``waking``: a parked task is on its way to it; ``resting``: nobody has it,
            and nobody gets it until `remaining` is over (`min_hold`, `cooldown`).
        units: How many units; 1 for one who is alone.
        slot: Which of them, from 0; -1: none of its own.
        since: When it was granted, in seconds since the epoch by the store's clock; 0: not known.
        remaining: Seconds that are left of the lease; infinite if somebody has taken its end away.
        waits_for: The key that its task waits for, where this one is kept meanwhile; None: it is on
            its way, or `Admin.show` has not looked.
    """

    who: Holder
    state: str
    units: int
    slot: int
    since: float
    remaining: float
    waits_for: "LockInfo | None" = None


@dataclass(frozen=True, slots=True)
class LockInfo:
    """
    A look at one key.

    Attributes:
        key: The key; of one longer than 160 characters, its beginning and a digest.
        state: ``held``; ``waking``: a parked task is on its way to it; ``resting``: what was held
            stays taken for a while, and nobody has it; or ``free``.
        holder: Who has it; of several, who has had it longest. None if it is free.
        since: When it was granted to the holder, in seconds since the epoch by the store's clock; 0
            if free, or if its record tells no time.
        remaining: Seconds that are left of the lease, of several that which ends first; infinite if
            somebody has taken its end away.
        token: The fencing token of the grant, of several that of all of them; 0 if free.
        waiting: How many wait, blocked or parked.
        oldest: When the first of them came, as `since`; 0 if nobody waits.
        woken: How many parked tasks are on their way.
        mode: ``alone``; ``shared``: others may have it beside its holder; empty if it is free.
        holds: What each has of it, who has had it longest first; at most `MOST_HOLDERS` of them.
        units: How many units all of them have.
        capacity: How many there were for who was last let in; 0: any number.
        limit: What an operator has set.
        rest: Seconds for which nobody is let in.
        starts: Of a key that has rates, how often it was taken of late.
        later: How many calls were sent for a later time, and join the queue then; above 50 perhaps
            with some that have come by a message meanwhile.
        due: Seconds until the first of them does; 0: there is none, or it is just about to.
        opens: Seconds until time alone lets the first enter who waits, by a rate, a rest or an
            operator's limit; None: that is not for time to do, or nobody waits.
        identities: How many calls are known, so that another one like it is a second one; above
            50 perhaps some that mean nothing any more.
    """

    key: str
    state: str
    holder: Holder | None
    since: float
    remaining: float
    token: int
    waiting: int
    oldest: float
    woken: int
    mode: str = ""
    holds: tuple[HoldInfo, ...] = ()
    units: int = 0
    capacity: int = 1
    limit: Limit | None = None
    rest: float = 0.0
    starts: tuple[Starts, ...] = ()
    later: int = 0
    due: float = 0.0
    opens: float | None = None
    identities: int = 0

    @property
    def most(self) -> int | None:
        """How many units may be in use, by an operator's limit if there is one; None: any."""
        if self.limit is not None and self.limit.capacity is not None:
            return self.limit.capacity
        return self.capacity or None

    @property
    def paused(self) -> bool:
        """Whether an operator lets nobody in."""
        return self.limit is not None and self.limit.pauses

    @property
    def is_in_use(self) -> bool:
        """Whether it has a holder, a waiter, a limit or a rest, or was used by a rate or a call."""
        waits = self.waiting or self.woken or self.later or self.identities
        return bool(self.holder or waits or self.limit or self.rest > 0 or self.starts)

    @property
    def may_open_sooner(self) -> bool:
        """Whether the first waiter may enter before `opens` is over, if holders end before."""
        if self.opens is None or not self.holds or self.paused or self.rest > 0:
            return False
        is_full = self.most is not None and self.units >= self.most
        has_rates = bool(self.starts or (self.limit and self.limit.rates))
        return self.mode == "shared" and (is_full or not has_rates)


@dataclass(frozen=True, slots=True)
class WaiterInfo:
    """
    One that waits.

    Attributes:
        place: 0 is next; None for one whose turn has come, or who has none yet.
        kind: ``woken``: on its way to the key; ``parked``: a task; ``blocked``: a process waits;
            ``later``: a call that joins the queue when it is due.
        who: Who it is.
        since: When it came, in seconds since the epoch by the store's clock; 0: not known.
        want: How much of the key it waits for.
        due: Seconds until it joins the queue; None for one who waits already.
    """

    place: int | None
    kind: str
    who: Holder
    since: float
    want: Want = ALONE
    due: float | None = None


@dataclass(frozen=True, slots=True)
class CallInfo:
    """
    One that has an identity: another call like it is a second one.

    Attributes:
        identity: What is alike: the task's name and its arguments, or as `lock_unique` has it.
        task_id: The task's id.
        where: ``waiting``, also for its time; ``coming``; ``running``; or ``ended``, and its
            identity is kept for a time.
    """

    identity: str
    task_id: str
    where: str


def known_time(seconds: float) -> float:
    """Return a time since the epoch; 0, not known, for what no calendar has."""
    return seconds if 0 < seconds < LATEST else 0.0


def is_of_interest(state: KeyState) -> bool:
    """Whether there is anything to say of a key but that it is free."""
    waits = state.waiting or state.woken or state.later
    return bool(state.token or waits or state.limit or state.rest > 0)


def lock_info(key: str, state: KeyState) -> LockInfo:
    """Return what *state* says of *key*, in the words of operators."""
    holds = _holds(state)
    first = holds[0] if holds else None
    return LockInfo(
        key_of(slot_name(key)),
        first.state if first else "free",
        first.who if first else None,
        first.since if first else 0.0,
        min(hold.remaining for hold in holds) if holds else state.remaining,
        state.token,
        state.waiting,
        known_time(state.oldest),
        state.woken,
        mode=("shared" if state.holders else "alone") if first else "",
        holds=holds,
        units=max(state.used, sum(hold.units for hold in holds)),
        capacity=state.capacity if state.holders else 1,
        limit=_limit(state.limit),
        rest=state.rest,
        starts=state.starts,
        later=state.later,
        due=state.due,
        opens=state.opens,
        identities=state.identities,
    )


def holds_named(info: LockInfo, holder: str = "", *, many: bool = False) -> list[HoldInfo]:
    """
    Return those of the holds of *info* that *holder* names.

    Args:
        info: A look at the key.
        holder: Its fencing token, the number of its process, alone or as ``host:pid``, the id
            of its task, or its owner; empty: the only one, or all of them.
        many: It may name several.

    Raises:
        DistlockError: It names nobody who has the key, or several.
    """
    found = [hold for hold in info.holds if not holder or holder in _names(info, hold)]
    key = shown(info.key)
    if not found and info.holds:
        raise DistlockError(
            f"{shown(holder)!r} is none of the holders of {key!r}, which are {_listed(info.holds)}"
        )
    if len(found) > 1 and not many:
        called = f" that {shown(holder)!r} fits" if holder else ""
        raise DistlockError(
            f"{key!r} has {len(found)} holders{called}: {_listed(found)}; `celery locks release"
            " KEY --holder` with a process, a task's id or an owner takes it from one of them,"
            " and --force from all"
        )
    return found


def _names(info: LockInfo, hold: HoldInfo) -> set[str]:
    """Return what a hold may be called by."""
    who, token = hold.who, str(info.token) if info.token > 0 else ""
    process = {str(who.pid), f"{who.host}:{who.pid}"} if who.pid else set()
    return {who.owner, who.task_id, token, *process} - {""}


def _listed(holds: Sequence[HoldInfo]) -> str:
    """Return who they are, by what tells them from each other."""
    some = [str(hold.who) or hold.who.owner for hold in holds[:MOST_LISTED]]
    more = len(holds) - len(some)
    return ", ".join(map(shown, some)) + (f" and {more} more" if more else "")


def waiter_info(place: int | None, kind: str, waiter: Waiter) -> WaiterInfo:
    """Return what a store says of one that waits, likewise."""
    who = Holder.of(waiter.owner)
    if waiter.run:
        who = Holder(waiter.task, task_id_of(waiter.run))
    return WaiterInfo(place, kind, who, known_time(waiter.since), waiter.want, waiter.due)


def _holds(state: KeyState) -> tuple[HoldInfo, ...]:
    """Return what each has; first those who run, and who has had it longest."""
    if not state.token:
        return ()
    records: Iterable[HolderRecord] = state.holders or (
        HolderRecord(state.owner, state.run, 1, -1, state.since, state.remaining),
    )
    holds = [_hold(record, state) for record in records]
    return tuple(sorted(holds, key=lambda hold: (_STATES.index(hold.state), hold.since)))


def _hold(record: HolderRecord, state: KeyState) -> HoldInfo:
    kind, who = "held", Holder.of(record.owner)
    if is_resting(record.owner):
        kind, who = "resting", Holder("", "", owner=record.owner)
    elif record.owner.startswith(PARKED):
        task = record.task or (state.task if record.run == state.run else "")
        kind, who = "waking", Holder(task, task_id_of(record.run), owner=record.owner)
    elif not who.task_id:
        who = replace(who, task_id=task_id_of(record.run))
    since = known_time(record.since)
    return HoldInfo(who, kind, record.units, record.slot, since, record.remaining)


def _limit(limit: Limit | None) -> Limit | None:
    if limit is None:
        return None
    return limit._replace(until=known_time(limit.until), since=known_time(limit.since))
