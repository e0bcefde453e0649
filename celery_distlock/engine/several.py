"""Acquire several keys in one step, and give keys up by another request than a release."""

from collections.abc import Callable, Sequence

from celery_distlock.stores.values import ALONE, Reply, Want

from .acquisition import erase, record, release_all_later, release_hold_later
from .hold import Hold, HoldState
from .watchdog import watchdog


def acquire_all(holds: Sequence[Hold]) -> bool:
    """
    Ask for the keys of *holds*, of one store and execution, in one step; hold all or none.

    False: not all of them are available, or this store takes only one at a time.

    Raises:
        StoreError: What the store may have granted is released in the background.
    """
    first = holds[0]
    try:
        for hold in holds:
            record(hold, at_once=True)
        replies = first.store.acquire_all(
            [hold.key for hold in holds],
            [hold.owner for hold in holds],
            first.terms.lease,
            run=first.run,
            redelivered=first.redelivered,
            retain=first.retain,
            **_wants_of(holds),
        )
        if replies is None:
            for hold in holds:
                erase(hold)
            return False
        taken = [hold.take(reply) for hold, reply in zip(holds, replies, strict=True)]
        for hold in holds:
            watchdog(hold.store).watch(hold)
            record(hold)
        for reply in replies:
            first.store.dispatch(reply.wake)
        if all(taken):
            return True
    except BaseException:
        release_all_later(holds)
        raise
    release_all_later(holds)  # granted too late to rely on
    return False


def _wants_of(holds: Sequence[Hold]) -> dict[str, list[Want]]:
    wants = [hold.want for hold in holds]
    return {} if all(want == ALONE for want in wants) else {"wants": wants}


def release_by(holds: Sequence[Hold], ask: Callable[[], Reply]) -> Reply:
    """
    Stop holding by *ask*, a request that itself gives the keys up; return its answer.

    Raises:
        StoreError: The keys are released in the background.
    """
    before = [hold.end() for hold in holds]
    try:
        reply = ask()
    except BaseException:
        for hold in holds:
            release_hold_later(hold)
        raise
    finally:
        for hold in holds:
            watchdog(hold.store).forget(hold)
    for hold, state in zip(holds, before, strict=True):
        erase(hold)
        if state is HoldState.HELD:
            hold.report_released()
    return reply
