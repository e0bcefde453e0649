"""The holders of a key, parsed from the owners in its record."""

import functools
from typing import TYPE_CHECKING, NamedTuple

from celery_distlock.naming import PARKED, is_resting

from .identities import Owner, task_id_of

if TYPE_CHECKING:
    from .values import Holder as HolderRecord
    from .values import KeyState

__all__ = ["Asked", "HoldInfo", "Holder", "holds_of", "known_time"]

LATEST = 253_402_300_799.0  # seconds since the epoch: the year 9999 ends
_STATES = ("held", "waking", "resting")  # of a hold; a key's state is the first one of its holds


class Holder(NamedTuple):
    """
    A task or a thread that holds a key or waits for it.

    Attributes:
        task: The task's name; for a :class:`~celery_distlock.Lock`, the name of its thread, and for
            an :class:`~celery_distlock.AsyncLock`, that of its asyncio task.
        task_id: The task's id; empty for a ``Lock``.
        host: The host; empty while the task is dispatched.
        pid: The process; 0 while the task is dispatched. In a prefork pool, the child.
        owner: The name of this acquisition, as in log lines.
    """

    task: str
    task_id: str
    host: str = ""
    pid: int = 0
    owner: str = ""

    @property
    def name(self) -> str:
        """Return the task's name, or ``thread`` and the name of the thread of a ``Lock``."""
        return f"thread {self.task}" if self.is_thread else self.task

    @property
    def is_thread(self) -> bool:
        """Whether this is a thread with a ``Lock``, and not a task or an unreadable owner."""
        return bool(self.host and not self.task_id)

    def __str__(self) -> str:
        name = f"{self.task or 'task'}[{self.task_id}]" if self.task_id else self.name
        return f"{name} on {self.host}, process {self.pid}" if self.host else name

    @classmethod
    def of(cls, owner: str) -> "Holder":
        """Parse the text of an :class:`~celery_distlock.stores.identities.Owner`."""
        known = Owner.parse(owner)
        if known is None:
            return cls(owner, "", owner=owner)
        return cls(known.task or owner, known.task_id, known.host, known.pid, owner)


class Asked(NamedTuple):
    """
    When a holder was asked to leave, and by what.

    Attributes:
        at: In seconds since the epoch by the store's clock; 0: it was not asked.
        by: ``a newer call`` or ``an operator``.
    """

    at: float = 0.0
    by: str = ""


class HoldInfo(NamedTuple):
    """
    One holder's part of a key.

    Attributes:
        who: The holder.
        state: ``held``; ``waking``: the key is reserved for a parked task that is dispatched;
            ``resting``: it has no holder, and is not granted until `remaining` is over (`min_hold`,
            `cooldown`).
        units: Number of units; 1 for an exclusive holder.
        slot: The number of its unit, from 0; -1: none.
        since: When it was granted, in seconds since the epoch by the store's clock; 0: unknown.
        remaining: Seconds that are left of the lease; infinite if its record has no expiry.
        asked: When it was asked to leave, and by what.
        waits_for: The other key that the task waits for while this one is reserved for it; None:
            the task is dispatched, or `Admin.show` has not looked.
    """

    who: Holder
    state: str
    units: int
    slot: int
    since: float
    remaining: float
    asked: Asked = Asked()
    waits_for: "KeyState | None" = None


def known_time(seconds: float) -> float:
    """Return *seconds* since the epoch, or 0 (unknown) if no calendar has that date."""
    return seconds if 0 < seconds < LATEST else 0.0


@functools.lru_cache(maxsize=64)  # one row of a table calls this several times
def holds_of(state: "KeyState", alone: "HolderRecord") -> tuple[HoldInfo, ...]:
    """Return the holds of all holders, or of the exclusive one, *alone*; those held first."""
    if not state.token:
        return ()
    waits = dict(state.elsewhere)
    holds = [_hold(record, state, waits.get(record.owner)) for record in state.holders or (alone,)]
    return tuple(sorted(holds, key=lambda hold: (_STATES.index(hold.state), hold.since)))


def _hold(record: "HolderRecord", state: "KeyState", waits_for: "KeyState | None") -> HoldInfo:
    kind, holder = "held", Holder.of(record.owner)
    if is_resting(record.owner):
        kind, holder = "resting", Holder("", "", owner=record.owner)
    elif record.owner.startswith(PARKED):
        task = record.task or (state.task if record.run == state.run else "")
        kind, holder = "waking", Holder(task, task_id_of(record.run), owner=record.owner)
    elif not holder.task_id:
        holder = holder._replace(task_id=task_id_of(record.run))
    since, left = known_time(record.since), record.remaining
    return HoldInfo(holder, kind, record.units, record.slot, since, left, record.asked, waits_for)
