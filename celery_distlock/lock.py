"""`Lock`: the lock that locked tasks take, for any other code."""

import math
import threading
import warnings
from types import TracebackType

from celery_distlock.stores.values import Reply, Status

from .engine.acquisition import acquire, held_here, release
from .engine.key_locks import KeyLock, tell_conflict
from .engine.lease import HoldState, Lease
from .engine.owners import current_task, is_held_beside
from .errors import LockError, LockNotOwnedError
from .naming import shown
from .stores import Store

__all__ = ["Lock"]


class Lock(KeyLock):
    """
    The lock that locked tasks take, for any other code: web code, scripts, the tasks' insides.

    Behaves as :class:`threading.RLock` does, between processes and machines: reentrant, owned by
    the thread that acquired it, released as often as acquired. Other than there, a held lock can be
    lost: when the store forgets it, or cannot be reached for as long as the lease is.

    Two locks of one key in one thread are one lock; the outermost acquisition's terms count.

    In a coroutine it blocks the event loop, and says so by a :exc:`RuntimeWarning`:
    :class:`~celery_distlock.AsyncLock` is the one for there. Its owner is the asyncio task then,
    not the thread that runs it.

    Args:
        key: Any text.
        lease: Seconds that the lock outlives this process's last sign of life. More survives longer
            pauses of the process; less lets others in sooner after a crash.
        watchdog: Renew the lease while it is held. False: a fixed lease, never renewed.
        store: A URL, a store, or None for the current Celery app's. A URL that is an app's
            `distlock_url` means that app's store, and so its prefix. Which store it is, is found
            when the lock is acquired; while this object holds it in a thread, it stays that one.
        prefix: What the names of the store's records begin with; only with a URL. Locks of two
            prefixes do not exclude each other.
        timeout: Seconds that ``with`` waits for the holder at most; None waits for ever.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range.
    """

    def __init__(
        self,
        key: str,
        *,
        lease: float = 30.0,
        watchdog: bool = True,
        store: Store | str | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(
            key, lease=lease, watchdog=watchdog, store=store, prefix=prefix, timeout=timeout
        )

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """
        Take the lock, and wait for it if *blocking*, first come first served.

        Args:
            blocking: False: do not wait.
            timeout: Seconds to wait for the holder at most; -1 waits for ever. A server that hangs
                is given up 15 seconds later at the latest.

        Returns:
            Whether the lock is held now.

        Raises:
            ValueError: *timeout* is negative, or given though not *blocking*.
            OverflowError: *timeout* is longer than `threading.TIMEOUT_MAX`.
            LockLostError: This thread held the lock already and has lost it.
            LockError: In a coroutine, without an end to the wait: another task of the same event
                loop holds the lock, and would never release it.
            StoreUnavailableError: The store did not answer; the lock is not held.
            QuorumError: Too few of several servers have confirmed it; likewise.
        """
        return self._acquire(_patience(blocking, timeout)) is None

    def _acquire(self, patience: float | None) -> Reply | None:
        """Return the store's answer if the lock is not held now."""
        task = current_task()
        store = self._store_for(task)
        if self._enter(store, task) is not None:
            return None
        if task is not None:
            warnings.warn(
                f"Lock({shown(self.key)!r}) blocks the event loop that runs this task until the"
                " store has answered, and for as long as it waits; use AsyncLock there",
                RuntimeWarning,
                stacklevel=3,
            )
            if patience is None and is_held_beside(task, store.identity, self.key):
                raise LockError(
                    f"lock {shown(self.key)!r} is held by another task of this event loop, which"
                    " cannot release it while Lock() blocks the loop; use AsyncLock"
                )
        hold = self._new_hold(store, task)
        reply = acquire(hold, timeout=patience)
        if reply.status is not Status.GRANTED:
            tell_conflict(hold, reply)
            return reply
        self._begin(hold, task)
        return None

    def release(self) -> None:
        """
        Undo one :meth:`acquire`; the lock is free after the last.

        Raises:
            LockNotOwnedError: This thread does not hold the lock.
            LockLostError: It did, and has lost it; somebody else may have run meanwhile.
        """
        task = current_task()
        hold = self._leave(self._store_for(task), task)
        if hold is None:
            return
        lost = not hold.held
        if release(hold) is HoldState.LOST or lost:
            raise hold.loss()

    def locked(self) -> bool:
        """Return whether anybody holds the lock at this moment; one round trip."""
        return bool(self._store.inspect(self.key).token)

    def __enter__(self) -> Lease:
        """
        Wait for the lock, `timeout` seconds at most if that was given; return the lease.

        Raises :exc:`~celery_distlock.errors.LockConflictError` if somebody else still has it then.
        """
        reply = self._acquire(self._timeout)
        if reply is not None:
            raise self._conflict(reply)
        return Lease((held_here()[self._store.identity, self.key],))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; say that the lock was lost unless the body has something to say itself."""
        try:
            self.release()
        except LockNotOwnedError:
            raise
        except Exception:
            if error is None:
                raise


def _patience(blocking: bool, timeout: float) -> float | None:
    # As threading.RLock.acquire() does, word for word where it matters to callers.
    if not blocking and timeout != -1:
        raise ValueError("can't specify a timeout for a non-blocking call")
    if math.isnan(timeout) or (timeout < 0 and timeout != -1):
        raise ValueError("timeout value must be a non-negative number")
    if timeout > threading.TIMEOUT_MAX:
        raise OverflowError("timeout value is too large")
    if not blocking:
        return 0.0
    return None if timeout == -1 else float(timeout)
