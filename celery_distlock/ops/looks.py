"""Views of keys for operators: holders, units in use and waiters."""

from collections.abc import Sequence
from dataclasses import dataclass

from celery_distlock.errors import DistlockError
from celery_distlock.keys import key_of, slot_name
from celery_distlock.naming import shown
from celery_distlock.stores.holders import Holder, HoldInfo, known_time
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.values import ALONE, KeyState, Limit, Waiter, Want

MOST_LISTED = 5  # holders in a sentence


@dataclass(frozen=True, slots=True)
class WaiterInfo:
    """
    A waiter of a key.

    Attributes:
        place: Position in the queue, 0 is next; None if it has left the queue or not joined it yet.
        kind: ``woken``: a task in flight to its key; ``parked``: a task in the queue; ``blocked``:
            a process that waits; ``later``: a delayed call that joins the queue when it is due.
        who: The name of the waiter.
        since: When it arrived, in seconds since the epoch by the store's clock; 0: unknown.
        want: How much of the key it requests.
        due: Seconds until it joins the queue; None unless it is a delayed call.
        leaves: Seconds until it leaves the queue if it still waits, because of its policy's timeout
            or its expiry; None: not known, or never.
    """

    place: int | None
    kind: str
    who: Holder
    since: float
    want: Want = ALONE
    due: float | None = None
    leaves: float | None = None


@dataclass(frozen=True, slots=True)
class CallInfo:
    """
    A call with an identity: later calls with the same identity are duplicates.

    Attributes:
        identity: The task's name and its arguments, or what `lock_unique` makes of them.
        task_id: The task's id.
        where: ``waiting``, in the queue or until it is due; ``coming``, in flight; ``running``; or
            ``ended``, while its identity is kept for a time.
    """

    identity: str
    task_id: str
    where: str


def is_of_interest(state: KeyState) -> bool:
    """Whether a key is held, waited for, limited or resting."""
    return bool(state.token or state.has_waiters or state.is_limited or state.rest > 0)


def lock_info(key: str, state: KeyState) -> KeyState:
    """Return *state* for display: with the name of *key*, and 0 for times out of range."""
    holds = state.holds
    return state._replace(
        key=key_of(slot_name(key)),
        since=holds[0].since if holds else 0.0,
        remaining=min((hold.remaining for hold in holds), default=state.remaining),
        oldest=known_time(state.oldest),
        limit=_limit(state.limit) if state.limit else None,
        lane_limits=tuple((lane, _limit(limit)) for lane, limit in state.lane_limits),
    )


def holds_named(info: KeyState, holder: str = "", *, many: bool = False) -> list[HoldInfo]:
    """
    Return the holds of *info* that match *holder*.

    Args:
        info: The state of the key.
        holder: A fencing token, a process id, with or without its host (``host:pid``), a task id
            or an owner; empty: all holds.
        many: Several holds may match.

    Raises:
        DistlockError: No hold of a held key matches, or several match and *many* is False.
    """
    found = [hold for hold in info.holds if not holder or holder in _names(info, hold)]
    key = shown(info.key)
    if not found and info.holds:
        raise DistlockError(
            f"{shown(holder)!r} is none of the holders of {key!r}: {_listed(info.holds)}"
        )
    if len(found) > 1 and not many:
        matching = f" that match {shown(holder)!r}" if holder else ""
        raise DistlockError(
            f"{key!r} has {len(found)} holders{matching}: {_listed(found)}; select one of them with"
            " --holder and its process, task id or owner, or release all with --force"
        )
    return found


def _names(info: KeyState, hold: HoldInfo) -> set[str]:
    """Return the names by which an operator may select *hold*."""
    holder, token = hold.who, str(info.token) if info.token > 0 else ""
    process = {str(holder.pid), f"{holder.host}:{holder.pid}"} if holder.pid else set()
    return {holder.owner, holder.task_id, token, *process} - {""}


def _listed(holds: Sequence[HoldInfo]) -> str:
    """Return the distinct names of *holds* for a message, the first `MOST_LISTED` of them."""
    some = [str(hold.who) or hold.who.owner for hold in holds[:MOST_LISTED]]
    more = len(holds) - len(some)
    return ", ".join(map(shown, some)) + (f" and {more} more" if more else "")


def waiter_info(place: int | None, kind: str, waiter: Waiter) -> WaiterInfo:
    """Return *waiter*, as the store describes it, for display."""
    name = Holder.of(waiter.owner)
    if waiter.run:
        name = Holder(waiter.task, task_id_of(waiter.run))
    came, want = known_time(waiter.since), waiter.want
    came += want.ahead / 1000 if came else 0.0
    return WaiterInfo(place, kind, name, came, want, waiter.due, waiter.leaves)


def _limit(limit: Limit) -> Limit:
    return limit._replace(until=known_time(limit.until), since=known_time(limit.since))
