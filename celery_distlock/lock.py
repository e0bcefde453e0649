"""`Lock`: the lock that locked tasks take, for any other code."""

import math
import threading
import warnings
from types import TracebackType

from celery_distlock.stores.values import ALONE, Reply, Status

from .engine.acquisition import acquire, held_here, release
from .engine.hold import Hold, HoldState
from .engine.key_locks import KeyLock, report_conflict
from .engine.lease import Lease
from .engine.owners import AnyTask, end_turn, held_by, is_held_by_other_task, owner_here
from .engine.upgrading import conflict, leave, upgrade, wants_upgrade
from .errors import LockError, LockNotOwnedError
from .naming import shown
from .stores import Store

__all__ = ["Lock"]


class Lock(KeyLock):
    """
    The lock that locked tasks take, for any other code: web code, scripts, code inside tasks.

    Behaves as :class:`threading.RLock` does, between processes and machines: reentrant, owned by
    the thread that acquired it, released as often as acquired. Unlike that class, a held lock can
    be lost: when the store loses its data, or cannot be reached for as long as the lease is.

    Two locks of one key in one thread are one lock: the terms of the outermost acquisition count,
    and only it takes units. An exclusive lock inside a shared one of the same key upgrades the
    outer lock for its duration: see :meth:`Lease.upgrade
    <celery_distlock.engine.lease.Lease.upgrade>`.

    In a coroutine it blocks the event loop, and emits a :exc:`RuntimeWarning`: use
    :class:`~celery_distlock.AsyncLock` there. The owner is then the asyncio task, not the thread
    that runs it.

    Args:
        key: Any text; or a :class:`~celery_distlock.Key`, which also has the amount to take. Its
            `cooldown` applies if the ``with`` block has ended without an error.
        capacity: As for :class:`~celery_distlock.Key`: the number of units; 1 is exclusive, None
            allows any number.
        weight: As for :class:`~celery_distlock.Key`: the number of units that this lock takes.
        shared: As for :class:`~celery_distlock.Key`: concurrent with any number of shared holders.
        rate: As for :class:`~celery_distlock.Key`: how often the key may be taken.
        lease: Seconds that the lock outlives this process's last sign of life. A longer lease
            survives longer pauses of the process; a shorter one admits others sooner after a crash.
        watchdog: Renew the lease while it is held. False: a fixed lease, never renewed.
        store: A URL, a store, or None for the current Celery app's. A URL that is an app's
            `distlock_url` means that app's store, and so its prefix. The store is looked up when
            the lock is acquired, and stays the same for as long as this object holds it in a
            thread.
        prefix: What the names of the store's records begin with; only with a URL. Locks of two
            prefixes do not exclude each other.
        timeout: Seconds that ``with`` waits for the holder at most; None waits for ever.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range; or, when the lock is
            first acquired, its store cannot share a key, or count units.
    """

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """
        Take the lock, and wait for it if *blocking*; first come, first served.

        Args:
            blocking: False: do not wait.
            timeout: Seconds to wait for the holder at most; -1 waits for ever. A server that hangs
                is given up at most 15 seconds later.

        Returns:
            Whether the lock is held now.

        Raises:
            ValueError: *timeout* is negative, or given although not *blocking*.
            OverflowError: *timeout* is longer than `threading.TIMEOUT_MAX`.
            LockLostError: This thread held the lock already and has lost it.
            LockConflictError: Only without a limit to the wait: this thread shares the key and
                wants it exclusive, and so does another holder; each would wait for the other.
            LockError: In a coroutine, without a limit to the wait: another task of the same event
                loop holds the lock, and would never release it.
            StoreUnavailableError: The store did not answer; the lock is not held.
            QuorumError: Too few of several servers have confirmed it; the lock is not held.
        """
        default = blocking and timeout == -1
        patience = None if default else _patience(blocking, timeout)
        reply = self._acquire(patience)
        if reply is not None and reply.status is Status.DEADLOCK and patience is None:
            raise conflict(self.key, reply)
        return reply is None

    def _acquire(self, patience: float | None) -> Reply | None:
        """Return the store's answer if the lock is not held now."""
        task, holds = owner_here()
        store, hold = self._enter(task, holds)
        if hold is not None:
            is_settled = hold.want is ALONE and not hold.unsettled
            if is_settled or not wants_upgrade(hold, self._want):
                return None
            return self._upgrade(hold, task, patience)
        blocks = None
        if task is not None:
            self._warn_of_blocking(stacklevel=4)
            blocks = self._blocks_itself(store, task) if patience is None else None
        if blocks is not None and self.wanted.alone:
            raise blocks
        hold = self._new_hold(store, task)
        reply = acquire(hold, timeout=patience if blocks is None else 0.0)
        if reply.status is not Status.GRANTED:
            report_conflict(hold, reply)
            if blocks is not None:  # what the other holder left of it is not enough
                raise blocks
            return reply
        self._begin(hold, holds)
        return None

    def _warn_of_blocking(self, stacklevel: int) -> None:
        warnings.warn(
            f"Lock({shown(self.key)!r}) blocks the event loop that runs this task until the store"
            " has answered, and for as long as it waits; use AsyncLock there",
            RuntimeWarning,
            stacklevel=stacklevel,
        )

    def _blocks_itself(self, store: Store, task: AnyTask | None) -> LockError | None:
        """Return the error to raise if waiting would block the task of this loop that has it."""
        if task is None or not is_held_by_other_task(task, store.identity, self.key):
            return None
        return LockError(
            f"lock {shown(self.key)!r} is held by another task of this event loop, which cannot"
            " release it while Lock() blocks the loop; use AsyncLock"
        )

    def _upgrade(self, hold: Hold, task: AnyTask | None, patience: float | None) -> Reply | None:
        """Upgrade what was entered; if that fails, leave it again and return the reason."""
        reply = None
        try:
            if task is not None:
                self._warn_of_blocking(stacklevel=5)
            blocks = self._blocks_itself(hold.store, task) if patience is None else None
            if blocks is not None:
                raise blocks
            reply = upgrade(hold, patience)
        finally:
            if reply is None or reply.status is not Status.GRANTED:
                self._leave(task, held_by(task))
                end_turn(task, hold)
        if reply.status is not Status.GRANTED:
            report_conflict(hold, reply)
            return reply
        hold.upgraded_at = hold.depth - 1
        return None

    def release(self) -> None:
        """
        Undo one :meth:`acquire`; the lock is free after the last.

        Raises:
            LockNotOwnedError: This thread does not hold the lock.
            LockLostError: This thread held the lock and has lost it; another holder may have run
                since.
        """
        self._release(succeeded=False)

    def _release(self, *, succeeded: bool) -> None:
        task, holds = owner_here()
        hold = self._leave(task, holds)
        if hold.depth:
            if hold.upgraded_at is not None:
                leave(hold)
            if hold.turns is not None:
                hold.turns.leave(task, hold)
            return
        lost = not hold.held
        if release(hold, succeeded=succeeded) is HoldState.LOST or lost:
            raise hold.loss()

    def locked(self) -> bool:
        """Return whether the lock has a holder at this moment; one round trip."""
        return bool(self._store.inspect(self.key).token)

    def __enter__(self) -> Lease:
        """
        Wait for the lock, at most `timeout` seconds if that was given; return the lease.

        Raises :exc:`~celery_distlock.errors.LockConflictError` if there is still another holder
        then.
        """
        reply = self._acquire(self._timeout)
        if reply is not None:
            raise conflict(self.key, reply)
        return Lease((held_here()[self._store.identity, self.key],))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; raise the loss of the lock unless the body raises something itself."""
        try:
            self._release(succeeded=error is None)
        except LockNotOwnedError:
            raise
        except Exception:
            if error is None:
                raise


def _patience(blocking: bool, timeout: float) -> float | None:
    # As threading.RLock.acquire(), word for word where it matters to callers.
    if timeout == -1:
        return None if blocking else 0.0
    if not blocking:
        raise ValueError("can't specify a timeout for a non-blocking call")
    if math.isnan(timeout) or timeout < 0:
        raise ValueError("timeout value must be a non-negative number")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError("timeout value is too large")
    return float(timeout)
