"""
From sharing a key to having it alone and back, of one who holds it.

Who waits to be alone stands before the queue: nobody enters, and it is called when the last of the
others has left. Of two who wait so at one key, each would wait for the other: the store tells the
second one at once.
"""

import logging
from collections.abc import Sequence

from celery_distlock import clock
from celery_distlock.errors import LockConflictError, LockError, StoreError, StoreUnavailableError
from celery_distlock.naming import shown
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.stores import CapacityStore
from celery_distlock.stores.values import ALONE, Reply, Status, Want

from .lease import Hold
from .owners import current_task

__all__ = [
    "UpgradeWaiter",
    "conflict",
    "downgrade",
    "downgrade_all",
    "is_left",
    "leave",
    "upgrade",
    "upgrade_all",
    "wants_upgrade",
]

logger = logging.getLogger(__name__)

LOOK = 1.0  # seconds after which one who waits asks again, though nobody has called
OUTAGE_PAUSE = 0.25  # seconds between its attempts while the store does not answer

_background = BackgroundNotifier("distlock-downgrades")


class UpgradeWaiter:
    """
    One who waits to have alone what it shares: what it asks between two pauses.

    Args:
        hold: What it shares.
        deadline: Until when, by the local clock.
        waits: False: it asks once, and does not keep others out.

    Attributes:
        pause: Seconds after which it asks again, though nobody calls.

    Raises:
        StoreError: The store cannot do it.
    """

    def __init__(self, hold: Hold, deadline: float, *, waits: bool) -> None:
        self._hold = hold
        self._deadline = deadline
        self._store = CapacityStore.of(hold.store)
        self.inbox = hold.store.inbox(hold.key, hold.owner) if waits else None
        self.pause = 0.0
        self._answered = False
        self._number = hold.begin_upgrade()

    def ask(self) -> Reply | None:
        """
        Ask once. None: others have it still; ask again after a call or `pause`.

        Raises:
            LockLostError: The key was lost.
            StoreError: The store refuses, or has not answered in time.
        """
        hold, pause = self._hold, LOOK
        hold.ensure_held()
        lease = hold.lease_for_change()
        try:
            reply = self._store.upgrade(hold.key, hold.owner, lease, self.inbox)
            self._answered = True
        except StoreUnavailableError:
            if not self._answered or clock.monotonic() >= self._deadline:
                raise
            pause = OUTAGE_PAUSE
        else:
            if reply.status is Status.GRANTED:
                hold.change(ALONE, reply, lease)
                return reply
            if reply.status is Status.FREE:
                raise _lost(hold)
            if reply.status is not Status.BUSY:
                return reply
            if self.inbox is None:
                self.give_up()
                return reply
            if clock.monotonic() >= self._deadline:
                self.give_up()
                return reply
        self.pause = max(0.0, min(pause, self._deadline - clock.monotonic()))
        return None

    def give_up(self) -> None:
        """
        Wait no more, and have what it had; does not raise for the store's sake.

        Does nothing after a later attempt has begun, which may have the key alone by now: that one
        gives up for both, also if it does not wait itself.
        """
        hold = self._hold
        if not hold.held or (self.inbox is None and self._number == 1):
            return
        lease = hold.lease_for_change()
        if self._number != hold.upgrades:
            return
        try:
            reply = self._store.downgrade(hold.key, hold.owner, lease)
        except StoreError as error:
            words = "nobody enters %r until it is given up by one who waited to have it alone: %s"
            logger.warning(words, shown(hold.key), error)
            return
        self._store.dispatch(reply.wake)
        if reply.status is Status.GRANTED and reply.token != hold.token:
            # It had the key alone already, when it gave up.
            hold.change(hold.shared_want, reply, lease)

    def give_up_later(self) -> None:
        """As `give_up`, in the background."""
        _background.submit(self.give_up)

    def close(self) -> None:
        """Be called no more."""
        if self.inbox is not None:
            self.inbox.close()


def upgrade(hold: Hold, timeout: float | None) -> Reply:
    """
    Have alone what *hold* shares, and wait for that for *timeout* seconds; None: for ever.

    Returns:
        The store's last answer. If it is not ``GRANTED``, *hold* is as it was.

    Raises:
        LockLostError: The key was lost.
        StoreError: Likewise; or the store cannot do it.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    waiter = UpgradeWaiter(hold, deadline, waits=timeout != 0)
    try:
        while (reply := waiter.ask()) is None:
            assert waiter.inbox is not None
            waiter.inbox.wait(waiter.pause)
        return reply
    except BaseException:
        waiter.give_up_later()
        raise
    finally:
        waiter.close()


def downgrade(hold: Hold) -> None:
    """
    Share what *hold* has alone.

    Raises:
        LockLostError: The key was lost.
        StoreUnavailableError: It did not answer, and may have done it: *hold* counts as shared.
        StoreError: It cannot do it, or refuses; *hold* is as it was.
    """
    store = CapacityStore.of(hold.store)
    lease = hold.lease_for_change()
    try:
        reply = store.downgrade(hold.key, hold.owner, lease)
    except BaseException as error:  # a time limit's exception, say, loses an answer, too
        if isinstance(error, StoreUnavailableError) or not isinstance(error, StoreError):
            hold.doubt()
            hold.note_downgrade()
        raise
    store.dispatch(reply.wake)
    if reply.status is not Status.GRANTED:
        raise _lost(hold)
    hold.change(hold.shared_want, reply, lease)
    hold.note_downgrade()


def upgrade_all(holds: Sequence[Hold], timeout: float | None) -> None:
    """
    Have all of *holds* alone, or leave them as they are; see :meth:`Lease.upgrade`.

    Raises:
        LockConflictError: One of them cannot be had.
    """
    if timeout is not None and not (type(timeout) in (int, float) and timeout >= 0):
        raise ValueError(
            f"timeout must be a number of seconds, 0 or more, or None, not {timeout!r}"
        )
    if current_task() is not None:
        raise LockError(
            "upgrade() would block the event loop that runs this task: use AsyncLock() for the same"
            " key inside the lock that is shared, which upgrades it"
        )
    deadline = None if timeout is None else clock.monotonic() + timeout
    upgraded: list[Hold] = []
    try:
        for hold in holds:
            hold.ensure_held()
            if hold.want.alone:
                continue
            left = None if deadline is None else max(0.0, deadline - clock.monotonic())
            reply = upgrade(hold, left)
            if reply.status is not Status.GRANTED:
                raise conflict(hold.key, reply)
            hold.sharing.clear()
            upgraded.append(hold)
    except Exception:
        for hold in upgraded:
            _share_again(hold)
        raise


def downgrade_all(holds: Sequence[Hold]) -> None:
    """Share those of *holds* that are held alone; see :meth:`Lease.downgrade`."""
    for hold in holds:
        hold.ensure_held()
        if hold.want.alone or hold.unconfirmed:
            downgrade(hold)


def wants_upgrade(hold: Hold, want: Want) -> bool:
    """Whether a re-entry that asks for *want* has to change what *hold* has."""
    return want.alone and not hold.want.alone


def is_left(hold: Hold) -> bool:
    """
    Whether the acquisition that has upgraded *hold* was undone, and not the one around it.

    Locks may be released in another order than they were taken: one that is left may be alone.
    """
    if hold.upgraded_at is None or not 0 < hold.depth <= hold.upgraded_at:
        return False
    return not hold.is_wanted_alone


def leave(hold: Hold) -> None:
    """
    Share what an inner acquisition has upgraded, after that was undone.

    Does not raise for the store's sake: others may be kept out then until the hold is given up.
    """
    if is_left(hold):
        hold.upgraded_at = None
        if hold.held and hold.want.alone:
            _share_again(hold)


def _share_again(hold: Hold) -> None:
    try:
        downgrade(hold)
    except StoreError as error:
        words = "%r may be held alone until it is given up, and not shared again: %s"
        logger.warning(words, shown(hold.key), error)
    except LockError as error:
        logger.debug("%r is not shared again: %s", shown(hold.key), error)


def conflict(key: str, reply: Reply) -> LockConflictError:
    """Return the error that says who holds *key*, and of an upgrade why it cannot be."""
    error = LockConflictError(key, reply.holder, reply.remaining, reply.wait)
    if reply.status is Status.DEADLOCK:
        error.add_note(
            "this one shares it and wants it alone, and so does another one who shares it: both"
            " would wait for each other"
        )
    return error


def _lost(hold: Hold) -> Exception:
    hold.lose("the store no longer knows it")
    return hold.loss()
