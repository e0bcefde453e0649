"""
From sharing a key to having it alone and back, of one who holds it.

Who waits to be alone stands before the queue: nobody enters, and it is called when the last of the
others has left. Of two who wait so at one key, each would wait for the other: the store tells the
second one at once.
"""

import logging
from collections.abc import Callable, Sequence

from celery_distlock import clock
from celery_distlock.errors import LockConflictError, LockError, StoreError, StoreUnavailableError
from celery_distlock.naming import shown
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.stores import QueueStore
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.values import ALONE, Reply, Status, Want

from .hold import GLANCE, GONE, Hold
from .owners import current_task

__all__ = [
    "UpgradeWaiter",
    "conflict",
    "downgrade",
    "downgrade_all",
    "leave",
    "leaving",
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
        inbox: Where it is called, from :meth:`open` on; None: it does not wait.
        pause: Seconds after which it asks again, though nobody calls.

    Raises:
        StoreError: The store cannot do it.
    """

    def __init__(self, hold: Hold, deadline: float, *, waits: bool) -> None:
        self._hold = hold
        self._deadline = deadline
        self._waits = waits
        self._store = QueueStore.of(hold.store)
        self.inbox: Inbox | None = None
        self.pause = 0.0
        self._answered = False
        self._may_have = False  # something that is to be given up
        self._number = hold.begin_upgrade()

    def open(self) -> None:
        """Prepare to be called; may take a request."""
        if self._waits:
            self.inbox = self._hold.store.inbox(self._hold.key, self._hold.owner)

    def ask(self) -> Reply | None:
        """
        Ask once. None: others have it still; ask again after a call or `pause`.

        Raises:
            LockLostError: The key was lost.
            StoreError: The store refuses, or has not answered in time.
        """
        hold, pause = self._hold, LOOK
        hold.ensure_held()
        try:
            reply = self._ask()
            self._answered = True
        except StoreUnavailableError:
            if not self._answered or clock.monotonic() >= self._deadline:
                raise
            pause = OUTAGE_PAUSE
        else:
            if reply.status is Status.GRANTED:
                return reply
            if reply.status is Status.FREE:
                raise _lost(hold)
            if reply.status is not Status.BUSY:
                return reply
            self._may_have = self.inbox is not None
            if self.inbox is None or clock.monotonic() >= self._deadline:
                self.give_up()
                return reply
        self.pause = max(0.0, min(pause, self._deadline - clock.monotonic()))
        return None

    def _ask(self) -> Reply:
        hold = self._hold
        with hold.changing:
            lease = hold.lease_for_change()
            self._may_have = True
            reply = self._store.units.upgrade(hold.key, hold.owner, lease, self.inbox)
            if reply.status is Status.GRANTED:
                hold.change(ALONE, reply, lease)
            return reply

    def settle(self) -> None:
        """Have what was granted until its holder changes it; called by the holder."""
        self._hold.settle(self._number)

    def give_up(self) -> None:
        """
        Wait no more, and have what it had; does not raise for the store's sake.

        Does nothing after a later attempt has begun, which may have the key alone by now: that one
        gives up for both, also if it does not wait itself.
        """
        hold = self._hold
        if not self._may_have and self._number == 1:
            return
        with hold.changing:
            if not hold.held or self._number != hold.upgrades:
                return
            lease = hold.lease_for_change()
            try:
                reply = self._store.units.downgrade(hold.key, hold.owner, lease)
            except StoreError as error:
                words = (
                    "nobody enters %r until it is given up by one who waited to have it alone: %s"
                )
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
        waiter.open()
        while (reply := waiter.ask()) is None:
            assert waiter.inbox is not None
            waiter.inbox.wait(waiter.pause)
        if reply.status is Status.GRANTED:
            waiter.settle()
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
    with hold.changing:
        reply = _downgrade(hold, QueueStore.of(hold.store))
    hold.store.dispatch(reply.wake)
    if reply.status is not Status.GRANTED:
        raise _lost(hold)


def _downgrade(hold: Hold, store: QueueStore) -> Reply:
    lease = hold.lease_for_change()
    before, hold.unsettled = hold.unsettled, True
    try:
        reply = store.units.downgrade(hold.key, hold.owner, lease)
    except BaseException as error:  # a time limit's exception, say, loses an answer, too
        if isinstance(error, StoreUnavailableError) or not isinstance(error, StoreError):
            hold.doubt()
            hold.note_downgrade()
        else:
            hold.unsettled = before
        raise
    if reply.status is Status.GRANTED:
        hold.change(hold.shared_want, reply, lease)
        hold.note_downgrade()
    return reply


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
            if not wants_upgrade(hold, ALONE):
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
    """Share those of *holds* that were declared shared, or all if none was; see `Lease`."""
    for hold in [hold for hold in holds if not hold.wanted.alone] or holds:
        hold.ensure_held()
        if hold.want.alone or hold.unconfirmed:
            downgrade(hold)


def wants_upgrade(hold: Hold, want: Want) -> bool:
    """Whether a re-entry that asks for *want* has to change what *hold* has, or to make sure."""
    return want.capacity == 1 and (hold.unsettled or hold.want.capacity != 1)


def leave(hold: Hold) -> None:
    """
    Share what an inner acquisition has upgraded, after that was undone.

    Does not raise for the store's sake: others may be kept out then until the hold is given up.
    """
    if (share := leaving(hold)) is not None:
        share()


def leaving(hold: Hold) -> Callable[[], None] | None:
    """
    Return what is to be done in :func:`leave`, in any thread; None: nothing.

    It is not done any more once a later attempt to have *hold* alone has begun: whoever enters from
    now on, and wants it alone, makes one.
    """
    if hold.upgraded_at is None or not 0 < hold.depth <= hold.upgraded_at:
        return None
    if hold.is_wanted_alone:  # locks may be released in another order than they were taken
        return None
    hold.upgraded_at = None
    hold.unsettled = True
    number = hold.upgrades
    return lambda: _share_after(hold, number)


def _share_after(hold: Hold, number: int) -> None:
    with hold.changing:
        if number == hold.upgrades and hold.held and hold.want.alone:
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
    hold.lose(hold.why_lost(GONE, patience=GLANCE))
    return hold.loss()
