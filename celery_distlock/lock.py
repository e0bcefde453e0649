"""
Taking a key, waiting for it, giving it up: what :class:`Lock` and locked tasks have in common.

A thread (under gevent, a greenlet) is the owner, as with :class:`threading.RLock`. What it holds is
counted here, so that taking a held key again costs no round trip and cannot go wrong.
"""

import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from . import clock
from .errands import give_back
from .errors import (
    ConfigurationError,
    LockConflictError,
    LockNotOwnedError,
    StoreError,
    StoreUnavailableError,
)
from .lease import Hold, HoldState, Lease, Terms
from .ledger import Ledger
from .naming import shown
from .settings import DEFAULT_PREFIX, check_lease, check_wait
from .stores import Ability, Store, open_store
from .stores.base import Ended, Inbox, Parcel, Reply, Status, Wake
from .watchdog import watchdog

logger = logging.getLogger(__name__)

__all__ = ["Lock", "held_here", "obtain", "obtain_all", "surrender", "trade"]

BACKSTOP = 1.0  # seconds, times the place in the queue, after which a waiter looks for itself
PATIENCE = 30.0  # seconds that one who is queued already bears with a store that does not answer
OUTAGE_PAUSE = 0.25  # seconds between its attempts

_here = threading.local()


def _after_fork() -> None:
    global _here  # noqa: PLW0603  # the forking thread's holds are the parent's
    _here = threading.local()
    if defaults.ledger is not None:
        defaults.ledger.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def held_here() -> dict[tuple[str, str], Hold]:
    """Return what this thread holds, by store identity and key."""
    try:
        holds: dict[tuple[str, str], Hold] = _here.holds
    except AttributeError:
        holds = _here.holds = {}
    return holds


def obtain(
    hold: Hold,
    *,
    timeout: float | None = 0.0,
    park: Parcel | None = None,
    repeated: bool = False,
    keep: bool = False,
) -> Reply:
    """
    Ask for the key of *hold*; begin to hold and to renew it if it is granted.

    Args:
        hold: A new hold.
        timeout: Seconds to wait for the key; 0 does not wait, None waits for ever.
        park: Leave the run in the key's queue instead of waiting.
        repeated: See :meth:`Store.acquire`.
        keep: Likewise.

    Returns:
        The store's last answer. If it is not ``GRANTED`` nothing is left behind but what was
        parked.

    Raises:
        StoreError: Also then, what the store may have granted is given back in the background.
    """
    deadline = float("inf") if timeout is None else clock.monotonic() + timeout
    try:
        while True:
            _note(hold)
            waits = park is None and timeout != 0
            if waits and hold.store.listens(hold.key):  # one request to be granted or to queue
                reply = _wait(hold, deadline, repeated, keep, answered=False)
            else:
                reply = _ask(hold, park, repeated, keep)
                if waits and reply.status is Status.BUSY:
                    reply = _wait(hold, deadline, repeated, keep, answered=True)
            if hold.state is HoldState.HELD:
                _note(hold)
                return reply
            hold.end()
            if reply.status is not Status.GRANTED:
                _strike(hold)
                return reply
            _give_back(hold)  # granted too late to be believed
            if park is None and clock.monotonic() >= deadline:
                return reply._replace(status=Status.BUSY)
            hold.start_over()
    except BaseException:
        # No answer, a time limit, a KeyboardInterrupt: the key may be ours, or become so.
        _let_go([hold])
        raise


def obtain_all(holds: Sequence[Hold]) -> bool:
    """
    Ask for the keys of *holds*, of one store and run, in one step; begin to hold all or none.

    False: not all of them are free, or this store takes only one at a time.

    Raises:
        StoreError: Also then, what the store may have granted is given back in the background.
    """
    first = holds[0]
    try:
        for hold in holds:
            _note(hold)
        replies = first.store.acquire_all(
            [hold.key for hold in holds],
            [hold.owner for hold in holds],
            first.terms.lease,
            run=first.run,
        )
        if replies is None:
            for hold in holds:
                _strike(hold)
            return False
        taken = [hold.take(reply) for hold, reply in zip(holds, replies, strict=True)]
        for hold in holds:
            watchdog(hold.store).watch(hold)
            _note(hold)
        if all(taken):
            return True
    except BaseException:
        _let_go(holds)
        raise
    _let_go(holds)  # granted too late to be believed
    return False


def _let_go(holds: Sequence[Hold]) -> None:
    for hold in holds:
        watchdog(hold.store).forget(hold)
        hold.end()
        _give_back(hold)


def _give_back(hold: Hold, ended: Ended = Ended.NO) -> None:
    owner = hold.owner
    _note(hold)  # nobody is to renew it any more
    give_back(
        hold.store,
        hold.key,
        owner,
        run=hold.run,
        ended=ended,
        on_done=lambda: _strike(hold, owner),
    )


def _note(hold: Hold) -> None:
    if defaults.ledger is not None:
        defaults.ledger.note(hold)


def _strike(hold: Hold, owner: str | None = None) -> None:
    if defaults.ledger is not None:
        defaults.ledger.strike(owner or hold.owner)


def _ask(hold: Hold, queue: Inbox | Parcel | None, repeated: bool, keep: bool) -> Reply:
    reply = hold.store.acquire(
        hold.key,
        hold.owner,
        hold.terms.lease,
        queue=queue,
        run=hold.run,
        repeated=repeated,
        keep=keep,
        arrival=hold.arrival,
    )
    hold.arrival = reply.arrival or hold.arrival
    if hold.take(reply):
        watchdog(hold.store).watch(hold)
    elif reply.wake is not None:
        hold.store.dispatch(reply.wake)
    return reply


def _wait(hold: Hold, deadline: float, repeated: bool, keep: bool, *, answered: bool) -> Reply:
    inbox = hold.store.inbox(hold.key, hold.owner)
    silent_since = None
    try:
        while True:
            try:
                reply = _ask(hold, inbox, repeated, keep)
                pause, silent_since, answered = _backstop(reply), None, True
            except StoreUnavailableError:
                if not answered:
                    raise
                now = clock.monotonic()
                silent_since = silent_since or now
                if now > min(deadline, silent_since + PATIENCE):
                    raise
                pause = OUTAGE_PAUSE
            else:
                if reply.status is not Status.BUSY:
                    return reply
                if clock.monotonic() >= deadline:
                    released = hold.store.release(hold.key, hold.owner, inbox=inbox)
                    hold.store.dispatch(released.wake)
                    return reply
            inbox.wait(max(0.0, min(pause, deadline - clock.monotonic())))
    except BaseException:
        give_back(hold.store, hold.key, hold.owner, inbox=inbox)
        raise
    finally:
        inbox.close()


def _backstop(reply: Reply) -> float:
    # The first looks when the holder's lease ends, the others one after the other behind it.
    return min(reply.remaining + 0.01, BACKSTOP) + BACKSTOP * reply.place


def surrender(
    hold: Hold,
    ended: Ended = Ended.NO,
    keep_for: tuple[str, float] | None = None,
    dispatch: Callable[[Wake | None], object] | None = None,
) -> HoldState:
    """
    Stop holding, and tell the store; return the state until then.

    *dispatch* takes what that wakes, instead of the store's own.

    Never raises for the store's sake: a release that is not answered goes on in the background,
    and the lease's end is behind that.
    """
    before = hold.end()  # a renewal that comes between asks as an owner of old: no harm
    if before is HoldState.ENDED or hold.pid != os.getpid():
        return before  # in a forked child, the hold is the parent's
    ours = True
    try:
        ours = hold.give_back(ended, keep_for, dispatch)
    except StoreError as error:
        logger.warning("%r is given back later, or its lease ends: %s", shown(hold.key), error)
        _give_back(hold, ended)
    except BaseException:  # a time limit's exception, say: the caller has to see it, and soon
        _give_back(hold, ended)
        raise
    else:
        _strike(hold)
    finally:
        watchdog(hold.store).forget(hold)
    if before is HoldState.HELD and not ours:
        hold.find_lost("the store no longer knew it when it was given up")
        return HoldState.LOST
    if before is HoldState.HELD:
        hold.tell_released()
    return before


def trade(hold: Hold, ask: Callable[[], Reply]) -> Reply:
    """
    Stop holding by *ask*, a request that gives the key up itself; return its answer.

    Raises:
        StoreError: The key is given back in the background.
    """
    before = hold.end()
    try:
        reply = ask()
    except BaseException:
        _give_back(hold)
        raise
    finally:
        watchdog(hold.store).forget(hold)
    _strike(hold)
    if before is HoldState.HELD:
        hold.tell_released()
    return reply


def no_store() -> Store:
    """Stand in for the current app's store where there is no app."""
    raise ConfigurationError(
        "Lock(store=None) needs a current Celery app; or name a store or a URL"
    )


def no_stores() -> list[Store]:
    """Stand in for the stores of the apps where there is none."""
    return []


class _Defaults:
    """What the Celery side puts in, so that this module need not know it."""

    store: Callable[[], Store] = staticmethod(no_store)
    stores: Callable[[], list[Store]] = staticmethod(no_stores)
    on_event: Callable[..., None] | None = None
    ledger: Ledger | None = None


defaults = _Defaults()


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
        reply = obtain(hold, timeout=patience)
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
        if surrender(hold) is HoldState.LOST or lost:
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
    place = _place(named)
    stores = {store.identity: store for store in known if _place(store) == place}
    if len(stores) > 1:
        prefixes = ", ".join(sorted(identity.rpartition("#")[2] for identity in stores))
        raise ConfigurationError(
            f"several apps lock at {place}, with the prefixes {prefixes}: call"
            " app.set_current(), or say Lock(..., prefix=...)"
        )
    return next(iter(stores.values()), named)


def _place(store: Store) -> str:
    return store.identity.rpartition("#")[0]


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
