"""What operators are shown of keys: who has them and how much of them, and who waits."""

from collections.abc import Sequence
from dataclasses import dataclass

from celery_distlock.errors import DistlockError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import printable, shown
from celery_distlock.stores.holders import Holder, HoldInfo, known_time
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.values import ALONE, KeyState, Limit, Waiter, Want

__all__ = [
    "CallInfo",
    "WaiterInfo",
    "holds_named",
    "is_of_interest",
    "lock_info",
    "printable",
    "waiter_info",
]

MOST_LISTED = 5  # holders in a sentence


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


def is_of_interest(state: KeyState) -> bool:
    """Whether there is anything to say of a key but that it is free."""
    waits = state.waiting or state.woken or state.later
    return bool(state.token or waits or state.limit or state.rest > 0)


def lock_info(key: str, state: KeyState) -> KeyState:
    """Return *state* as operators see *key*: with its name, and with times that a calendar has."""
    holds = state.holds
    return state._replace(
        key=key_of(slot_name(key)),
        since=holds[0].since if holds else 0.0,
        remaining=min((hold.remaining for hold in holds), default=state.remaining),
        oldest=known_time(state.oldest),
        limit=_limit(state.limit),
    )


def holds_named(info: KeyState, holder: str = "", *, many: bool = False) -> list[HoldInfo]:
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


def _names(info: KeyState, hold: HoldInfo) -> set[str]:
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


def _limit(limit: Limit | None) -> Limit | None:
    if limit is None:
        return None
    return limit._replace(until=known_time(limit.until), since=known_time(limit.since))
