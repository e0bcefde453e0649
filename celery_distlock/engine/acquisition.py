"""
Acquire a key and release it: what locks and locked tasks have in common.

Off this path: :mod:`.waiting` if the key is held, :mod:`.several` for several keys in one step, and
:mod:`.pending_releases` for a release that is not answered.
"""

import logging
from collections.abc import Callable, Sequence

from celery_distlock import clock
from celery_distlock.errors import ConfigurationError, StoreError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.stores import AcquireRequest, Store
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.values import (
    Completion,
    ParkRequest,
    Reply,
    Status,
    WokenTask,
)

from .hold import ENDED, GLANCE, HELD, LOST, Hold, HoldState
from .owners import held_here
from .pending_releases import release_later
from .shared_holds import SharedHolds
from .waiting import wait_for
from .watchdog import watchdog

logger = logging.getLogger(__name__)

__all__ = [
    "acquire",
    "ask",
    "conclude",
    "defaults",
    "erase",
    "give_back",
    "give_up",
    "held_here",
    "record",
    "release",
    "release_all_later",
    "release_hold_later",
]


def _reset_shared_holds() -> None:
    if defaults.shared_holds is not None:
        defaults.shared_holds.after_fork()


at_fork(_reset_shared_holds, ForkStage.HOLDS)


def acquire(
    hold: Hold,
    *,
    timeout: float | None = 0.0,
    park: ParkRequest | None = None,
) -> Reply:
    """
    Ask for the key of *hold*; begin to hold and to renew it if it is granted.

    Args:
        hold: A new hold.
        timeout: Seconds to wait for the key; 0 does not wait, None waits for ever.
        park: Leave the execution in the key's queue instead of waiting.

    Returns:
        The store's last answer. If it is not ``GRANTED``, nothing is left in the store except a
        parked execution.

    Raises:
        StoreError: What the store may have granted is released in the background.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    try:
        waits = park is None and timeout != 0
        while True:
            if defaults.shared_holds is not None:
                defaults.shared_holds.record(hold, at_once=not waits)
            # One request either gets the key or joins the queue.
            if waits and hold.store.subscribed(hold.key):
                reply = wait_for(hold, deadline, ask, answered=False)
            else:
                reply = ask(hold, park)
                if waits and reply.status is Status.BUSY:
                    reply = wait_for(hold, deadline, ask, answered=True)
            until = deadline if park is None else float("inf")
            concluded = conclude(hold, reply, until, at_once=not waits)
            if concluded is not None:
                return concluded
    except BaseException:
        # No answer, a time limit, a KeyboardInterrupt: the key may be ours, or become ours.
        release_all_later([hold])
        raise


def conclude(hold: Hold, reply: Reply, deadline: float, *, at_once: bool = False) -> Reply | None:
    """Return the caller's answer, once the waiter has left the queue; None: ask again."""
    if hold.state is HELD:
        if not at_once or hold.terms.max_hold is not None:  # else it is recorded as held already
            record(hold)
        return reply
    hold.end()
    if reply.status is not Status.GRANTED:
        erase(hold)
        return reply
    release_hold_later(hold)  # granted too late to rely on
    if clock.monotonic() >= deadline:
        return reply._replace(status=Status.BUSY)
    hold.start_over()
    return None


def release_all_later(holds: Sequence[Hold]) -> None:
    """Give up each of *holds*, as by :func:`give_up`."""
    for hold in holds:
        give_up(hold)


def give_up(hold: Hold, inbox: Inbox | None = None) -> None:
    """Stop holding, and stop waiting at *inbox*. Release what the store granted, now or later."""
    watchdog(hold.store).forget(hold)
    hold.end()
    release_hold_later(hold, inbox=inbox)


def release_hold_later(
    hold: Hold,
    ended: Completion = Completion.NO,
    inbox: Inbox | None = None,
    rest: tuple[str, float] | None = None,
) -> None:
    """Release what *hold*, which has ended, may have in the store, in the background."""
    request = hold.release_request(ended, inbox=inbox, keep_for=rest)
    record(hold)  # no process may renew it from now on
    release_later(hold.store, request, lambda: erase(hold, request.owner))


def record(hold: Hold, *, at_once: bool = False) -> None:
    """Record the state of *hold* for this worker's main process, if any; see `SharedHolds`."""
    if defaults.shared_holds is not None:
        defaults.shared_holds.record(hold, at_once=at_once)


def erase(hold: Hold, owner: str | None = None) -> None:
    """Remove the record of *hold*, or of its former *owner*: nothing of it is in the store."""
    if defaults.shared_holds is not None:
        defaults.shared_holds.erase(owner or hold.owner)


def ask(hold: Hold, queue: Inbox | ParkRequest | None) -> Reply:
    """Ask for the key once; begin to hold and to renew it if it is granted."""
    key, lease, run = hold.key, hold.terms.lease, hold.run
    # By their places: a named tuple takes longer by names.
    more = hold.redelivered, hold.retain, hold.arrival, hold.want
    reply = hold.store.acquire(AcquireRequest(key, hold.owner, lease, queue, run, *more))
    hold.arrival = reply.arrival or hold.arrival
    if hold.take(reply):
        watchdog(hold.store).watch(hold)
    if reply.wake is not None:
        hold.store.dispatch(reply.wake)
    return reply


def release(
    hold: Hold,
    ended: Completion = Completion.NO,
    keep_for: tuple[str, float] | None = None,
    dispatch: Callable[[WokenTask | None], object] | None = None,
    *,
    succeeded: bool | None = None,
) -> HoldState:
    """
    Stop holding and release the key in the store; return the state before.

    *dispatch* takes the task that this wakes, in place of the store's own dispatch. Without
    *keep_for* the key rests by its own terms: *succeeded* is whether what ran under it succeeded,
    None if nothing ran.

    Never raises because of the store: a release that is not answered is repeated in the background,
    and if that fails too the lease ends.
    """
    rest = None
    hold.begun = succeeded is not None
    if keep_for is None and succeeded is not None:
        rest = hold.rest(succeeded=succeeded)
    before = hold.end()  # A renewal in between uses an owner that no longer holds: no harm.
    return give_back(hold, before, ended, keep_for, dispatch, rest)


def give_back(
    hold: Hold,
    before: HoldState,
    ended: Completion = Completion.NO,
    keep_for: tuple[str, float] | None = None,
    dispatch: Callable[[WokenTask | None], object] | None = None,
    rest: tuple[str, float] | None = None,
) -> HoldState:
    """Release *hold*, which was *before* and has ended, in the store; the key is free or rests."""
    if before is ENDED or hold.is_parents:
        return before  # in a forked child, the hold is the parent's
    ours = True
    try:
        request = hold.release_request(
            ended, keep_for=keep_for or rest, own_channel=hold.own_channel
        )
        released = hold.store.release(request)
        if released.wake is not None:
            (dispatch or hold.store.dispatch)(released.wake)
        ours = released.released
    except StoreError as error:
        logger.warning("%r is released later, or its lease ends: %s", shown(hold.key), error)
        release_hold_later(hold, ended, rest=rest)
    except BaseException:  # such as a time limit's exception, which the caller has to get soon
        release_hold_later(hold, ended, rest=rest)
        raise
    else:
        if defaults.shared_holds is not None:
            defaults.shared_holds.erase(hold.owner)
    finally:
        watchdog(hold.store).forget(hold)
    if before is HELD and not ours:
        late = "the store no longer knew it when it was given up"
        hold.find_lost(hold.why_lost(late, patience=GLANCE))
        return LOST
    if before is HELD:
        hold.report_released()
    return before


def no_store() -> Store:
    """Replace the current app's store where there is no app: raise an error."""
    raise ConfigurationError(
        "Lock(store=None) needs a current Celery app; or name a store or a URL"
    )


def no_stores() -> list[Store]:
    """Replace the stores of the apps where there is no app: none."""
    return []


class _Defaults:
    """What the Celery side registers here, so that this module does not depend on it."""

    store: Callable[[], Store] = staticmethod(no_store)
    stores: Callable[[], list[Store]] = staticmethod(no_stores)
    on_event: Callable[..., None] | None = None
    shared_holds: SharedHolds | None = None


defaults = _Defaults()
