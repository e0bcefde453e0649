"""`Lock`: the lock that locked tasks take, for any other code."""

import math
import threading
from types import TracebackType
from typing import Any

from celery_distlock.stores.values import Reply, Status

from .engine.acquisition import acquire, defaults, held_here, release
from .engine.lease import Hold, HoldState, Lease, Terms
from .errors import ConfigurationError, LockConflictError, LockNotOwnedError
from .naming import shown
from .settings import DEFAULT_PREFIX, check_lease, check_wait
from .stores import Ability, Store, open_store

__all__ = ["Lock"]


class Lock:
    """
    The lock that locked tasks take, for any other code: web code, scripts, the tasks' insides.

    Behaves as :class:`threading.RLock` does, between processes and machines: reentrant, owned by
    the thread that acquired it, released as often as acquired. Other than there, a held lock can be
    lost: when the store forgets it, or cannot be reached for as long as the lease is.

    Two locks of one key in one thread are one lock; the outermost acquisition's terms count.

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
        given: Any = key  # annotations do not keep anybody from giving something else
        if not isinstance(given, str) or not key:
            raise ConfigurationError(f"Lock() takes a key, a text that is not empty, not {key!r}")
        if not isinstance(watchdog, bool):
            raise ConfigurationError(f"watchdog must be True or False, not {watchdog!r}")
        if store is not None and not isinstance(store, str | Store):
            raise ConfigurationError(f"store must be a URL, a store or None, not {store!r}")
        if prefix is not None and not isinstance(store, str):
            raise ConfigurationError("prefix goes with a store's URL; a store has its own")
        self.key = key
        self._terms = Terms(check_lease(lease), watchdog=watchdog)
        self._timeout = None if timeout is None else check_wait(timeout, "timeout")
        self._named_store = store if isinstance(store, Store) else None
        self._finds_prefix = isinstance(store, str) and prefix is None
        if isinstance(store, str):
            self._named_store = open_store(store, prefix or DEFAULT_PREFIX)

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
            StoreUnavailableError: The store did not answer; the lock is not held.
            QuorumError: Too few of several servers have confirmed it; likewise.
        """
        return self._acquire(_patience(blocking, timeout)) is None

    def _acquire(self, patience: float | None) -> Reply | None:
        """Return the store's answer if the lock is not held now."""
        store = self._store
        holds = held_here()
        hold = holds.get((store.identity, self.key))
        if hold is not None:
            hold.ensure_held()
            hold.depth += 1
            hold.takers.append(self)
            return None
        hold = self._new_hold(store)
        reply = acquire(hold, timeout=patience)
        if reply.status is not Status.GRANTED:
            hold.on_event(
                "lock_conflict", key=self.key, holder=reply.holder, remaining=reply.remaining
            )
            return reply
        holds[store.identity, self.key] = hold
        hold.takers.append(self)
        return None

    def release(self) -> None:
        """
        Undo one :meth:`acquire`; the lock is free after the last.

        Raises:
            LockNotOwnedError: This thread does not hold the lock.
            LockLostError: It did, and has lost it; somebody else may have run meanwhile.
        """
        holds = held_here()
        store = self._store
        hold = holds.get((store.identity, self.key))
        if hold is None:
            raise LockNotOwnedError(f"lock {shown(self.key)!r} is not held by this thread")
        if self in hold.takers:  # else it was another Lock of this key that took it
            hold.takers.remove(self)
        hold.depth -= 1
        if hold.depth:
            return
        del holds[store.identity, self.key]
        lost = not hold.held
        if release(hold) is HoldState.LOST or lost:
            raise hold.loss()

    def locked(self) -> bool:
        """Return whether anybody holds the lock at this moment; one round trip."""
        return bool(self._store.inspect(self.key).token)

    @property
    def lease(self) -> Lease | None:
        """What this thread holds, or None."""
        hold = held_here().get((self._store.identity, self.key))
        return None if hold is None else Lease((hold,))

    def __enter__(self) -> Lease:
        """
        Wait for the lock, `timeout` seconds at most if that was given; return the lease.

        Raises :exc:`~celery_distlock.errors.LockConflictError` if somebody else still has it then.
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
        """Release; say that the lock was lost unless the body has something to say itself."""
        try:
            self.release()
        except LockNotOwnedError:
            raise
        except Exception:
            if error is None:
                raise

    def __repr__(self) -> str:
        try:
            lease = self.lease
        except ConfigurationError:  # no store yet
            lease = None
        return f"<Lock {shown(self.key)!r}: {lease or 'not held here'}>"

    @property
    def _store(self) -> Store:
        named = self._named_store
        if named is not None and not self._finds_prefix:
            return named
        for hold in held_here().values():  # apps may have come and gone since it was taken
            if self in hold.takers:
                return hold.store
        return defaults.store() if named is None else _with_an_apps_prefix(named)

    def _new_hold(self, store: Store) -> Hold:
        if Ability.WAIT not in store.abilities:
            raise ConfigurationError(f"{store.identity} cannot let callers wait")
        report: Any = defaults.on_event
        label = threading.current_thread().name
        if report is None:
            return Hold(store, self.key, self._terms, label=label)
        return Hold(
            store,
            self.key,
            self._terms,
            label=label,
            on_event=lambda name, **facts: report(name, self, store, **facts),
        )


def _with_an_apps_prefix(named: Store) -> Store:
    """Return the app's store that is where *named* is, or else *named*."""
    known = defaults.stores()
    if not known:
        return named
    place = named.address
    stores = {store.identity: store for store in known if store.address == place}
    if len(stores) > 1:
        prefixes = ", ".join(sorted(identity.rpartition("#")[2] for identity in stores))
        raise ConfigurationError(
            f"several apps lock at {place}, with the prefixes {prefixes}: call"
            " app.set_current(), or say Lock(..., prefix=...)"
        )
    return next(iter(stores.values()), named)


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


def conflict(key: str, reply: Reply) -> LockConflictError:
    """Return the error that says who holds *key*."""
    return LockConflictError(key, holder=reply.holder, remaining=reply.remaining)
