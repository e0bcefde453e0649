"""
Change a held key from shared to exclusive and back.

A holder that waits for an upgrade is ahead of the queue: no caller is admitted, and the holder gets
a push when the last of the others has left. Two upgrades waiting at one key would wait for each
other: the store refuses the second one immediately.
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

logger = logging.getLogger(__name__)

LOOK = 1.0  # seconds after which a waiter asks again without a push
OUTAGE_PAUSE = 0.25  # seconds between its attempts while the store does not answer

_background = BackgroundNotifier("distlock-downgrades")


class UpgradeWaiter:
    """
    A shared holder that waits for an upgrade: its requests between two pauses.

    Args:
        hold: The shared hold.
        deadline: When to stop waiting, by the local clock.
        waits: False: ask once, and do not keep others out.

    Attributes:
        inbox: Where pushes arrive, from :meth:`open` on; None: it does not wait.
        pause: Seconds after which it asks again without a push.

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
        self._may_have = False  # whether the store may have granted it something to give up
        self._number = hold.begin_upgrade()

    def open(self) -> None:
        """Prepare for pushes; may take a request."""
        if self._waits:
            self.inbox = self._hold.store.inbox(self._hold.key, self._hold.owner)

    def ask(self) -> Reply | None:
        """
        Ask once. None: there are still other holders; ask again after a push or `pause`.

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
        """Keep what was granted until its holder changes it; called by the holder."""
        self._hold.settle(self._number)

    def give_up(self) -> None:
        """
        Stop waiting, and return to what it had; does not raise because of the store.

        Does nothing after a later attempt has begun, which may have upgraded the key by now: that
        attempt gives up for both, even if it does not wait itself.
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
                words = "an abandoned upgrade of %r keeps other callers out until its release: %s"
                logger.warning(words, shown(hold.key), error)
                return
            self._store.dispatch(reply.wake)
            if reply.status is Status.GRANTED and reply.token != hold.token:
                # The upgrade had been granted when it gave up.
                hold.change(hold.shared_want, reply, lease)

    def give_up_later(self) -> None:
        """Call `give_up` in the background."""
        _background.submit(self.give_up)

    def close(self) -> None:
        """Stop receiving pushes."""
        if self.inbox is not None:
            self.inbox.close()


def upgrade(hold: Hold, timeout: float | None) -> Reply:
    """
    Upgrade *hold*, and wait for it for *timeout* seconds; None: for ever.

    Returns:
        The store's last answer. If it is not ``GRANTED``, *hold* is as it was.

    Raises:
        LockLostError: The key was lost.
        StoreError: The store cannot do it, or the upgrade failed; *hold* is as it was.
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
    Change *hold* from exclusive to shared.

    Raises:
        LockLostError: The key was lost.
        StoreUnavailableError: The store did not answer, and may have done it: *hold* counts as
            shared.
        StoreError: The store cannot do it, or refuses; *hold* is as it was.
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
    except BaseException as error:  # a time limit's exception, for example, also loses an answer
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
    Upgrade all of *holds*, or leave them as they are; see :meth:`Lease.upgrade`.

    Raises:
        LockConflictError: One of them cannot be upgraded.
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
    """Whether a re-entry that asks for *want* must change what *hold* has, or confirm it."""
    return want.capacity == 1 and (hold.unsettled or hold.want.capacity != 1)


def leave(hold: Hold) -> None:
    """
    Share again what an inner acquisition has upgraded, after that was undone.

    Does not raise because of the store: others may then be refused until the hold is released.
    """
    if (share := leaving(hold)) is not None:
        share()


def leaving(hold: Hold) -> Callable[[], None] | None:
    """
    Return the step for :func:`leave`, to call in any thread; None: nothing to do.

    The step does nothing once a later attempt to upgrade *hold* has begun: every re-entry from now
    on that wants it exclusive makes one.
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
        words = "%r may stay exclusive until it is released, instead of shared again: %s"
        logger.warning(words, shown(hold.key), error)
    except LockError as error:
        logger.debug("%r is not shared again: %s", shown(hold.key), error)


def conflict(key: str, reply: Reply) -> LockConflictError:
    """Return the error that names the holder of *key*, and why an upgrade cannot succeed."""
    error = LockConflictError(key, reply.holder, reply.remaining, reply.wait)
    if reply.status is Status.DEADLOCK:
        error.add_note(
            "this holder shares it and wants it exclusive, and so does another holder: both"
            " would wait for each other"
        )
    return error


def _lost(hold: Hold) -> Exception:
    hold.lose(hold.why_lost(GONE, patience=GLANCE))
    return hold.loss()
