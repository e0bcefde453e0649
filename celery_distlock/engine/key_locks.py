"""What `Lock` and `AsyncLock` have in common: arguments, the store, and re-entry."""

import threading
import warnings
from collections.abc import Iterable
from typing import Any

from celery_distlock.errors import ConfigurationError, LockNotOwnedError
from celery_distlock.key import UNSAID, Key
from celery_distlock.naming import shown
from celery_distlock.rate import RateLike
from celery_distlock.settings import DEFAULT_PREFIX, checked
from celery_distlock.stores import Store, open_store
from celery_distlock.stores.values import ALONE, Reply
from celery_distlock.templates import has_address, unfilled_in

from .acquisition import defaults
from .hold import Hold, Terms, ensure_able, want_of
from .lease import Lease
from .owners import AnyTask, Holds, held_by, held_here, hold_around, hold_here, turns_of
from .task_holds import TaskHold
from .watchdog import watchdog


class KeyLock:
    """A lock of one key; the arguments are those of :class:`~celery_distlock.Lock`."""

    def __init__(
        self,
        key: str | Key,
        *,
        capacity: int | None = UNSAID,
        weight: int = 1,
        shared: bool = False,
        rate: RateLike | None = None,
        lease: float = 30.0,
        watchdog: bool = True,
        store: Store | str | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
    ) -> None:
        self.wanted = key_wanted(type(self).__name__, key, capacity, weight, shared, rate)
        self._warn_of_what_nothing_fills_in()
        checked("watchdog", watchdog)
        if store is not None and not isinstance(store, str | Store):
            kind = type(store)
            raise ConfigurationError(
                "store must be a URL such as redis://localhost:6379/0, a store of"
                f" celery_distlock.stores or None, not a {kind.__module__}.{kind.__qualname__}"
            )
        if prefix is not None and not isinstance(store, str):
            raise ConfigurationError("prefix is for a store's URL; a store object has its own")
        self.key = self.wanted.template
        self._want = want_of(self.wanted)
        self._terms = Terms(checked("lease", lease), watchdog=watchdog)
        self._timeout = None if timeout is None else checked("wait", timeout, "timeout")
        named = DEFAULT_PREFIX if prefix is None else prefix
        self._named_store = open_store(store, named) if isinstance(store, str) else store
        self._finds_store = store is None or (isinstance(store, str) and prefix is None)

    def _warn_of_what_nothing_fills_in(self) -> None:
        text = self.wanted.template
        if not unfilled_in(text) and not has_address(text):
            return
        kind = type(self).__name__
        own_init = type(self).__init__ is not KeyLock.__init__
        # Without the key: Python would keep a registry entry for each text.
        warnings.warn(
            f"{kind}() takes the key as it is, and this key contains a template's field, or an"
            f' object\'s address: write {kind}(f"stock:{{sku}}"), or {kind}(task.key_for(sku))',
            stacklevel=4 if own_init else 3,
        )

    @property
    def lease(self) -> Lease | None:
        """What the caller holds, or None."""
        hold = hold_here(self._store.identity, self.key)
        return None if hold is None else Lease((hold,))

    def __repr__(self) -> str:
        try:
            lease = self.lease
        except ConfigurationError:  # no store yet
            lease = None
        return f"<{type(self).__name__} {shown(self.key)!r}: {lease or 'not held here'}>"

    @property
    def _store(self) -> Store:
        return self._look(held_here())[0]

    def _look(self, holds: Holds) -> tuple[Store, Hold | None]:
        """Return the store of this object for the owner of *holds*, and what it holds there."""
        named = self._named_store
        if self._finds_store:
            for hold in holds.values():  # apps may have come and gone since it was taken
                if self in hold.takers:
                    return hold.store, hold
            if named is None:
                named = defaults.store()
            elif known := defaults.stores():
                named = with_an_apps_prefix(named, known)
        assert named is not None
        return named, holds.get((named.identity, self.key))

    def _enter(self, task: AnyTask | None, holds: Holds) -> tuple[Store, Hold | None]:
        """
        Re-enter what *holds*, of *task* or the thread, has already; None: it has nothing.

        If it needs an upgrade and does not get it, the caller must leave it again.

        Raises:
            LockLostError: The key was lost.
        """
        store, hold = self._look(holds)
        if hold is None and task is not None:
            hold = self._begin_turn(store, task)
        if hold is not None:
            hold.ensure_held()
            hold.depth += 1
            hold.takers.append(self)
        return store, hold

    def _begin_turn(self, store: Store, task: AnyTask) -> Hold | None:
        """Return what the thread holds around the loop, if *task* may have its turn under it."""
        hold = hold_around(store.identity, self.key)
        if hold is None or not turns_of(hold).may_take(task):
            return None
        hold.ensure_held()
        turns_of(hold).take(task, hold)
        held_by(task)[store.identity, self.key] = hold
        return hold

    def _begin(self, hold: Hold, holds: Holds) -> None:
        """Note that *hold* was granted to the owner of *holds*."""
        holds[hold.store.identity, self.key] = hold
        hold.takers.append(self)

    def _leave(self, task: AnyTask | None, holds: Holds) -> Hold:
        """
        Undo one acquisition; if the depth is 0 after it, the hold must be released.

        Raises:
            LockNotOwnedError: The caller holds nothing.
        """
        store, hold = self._look(holds)
        if hold is None:
            owner = "thread" if task is None else "task"
            where = self._taken_elsewhere(store)
            raise LockNotOwnedError(f"lock {shown(self.key)!r} is not held by this {owner}{where}")
        if hold.turns is not None and task is None:
            hold.turns.drop_dead(hold)
        hold.leave(self)
        if hold.depth == 0 or (hold.turns is not None and hold.turns.ends(task, hold)):
            del holds[store.identity, self.key]
        return hold

    def _taken_elsewhere(self, store: Store) -> str:
        """Return which owners here took the key by this very object, for the error text."""
        labels = {hold.label for hold in watchdog(store).holds() if self in hold.takers}
        if not labels:
            return ""
        names = " and ".join(repr(shown(label)) for label in sorted(labels))
        return f", but by {names}: it is released where it was acquired"

    def _new_hold(self, store: Store, task: AnyTask | None) -> Hold:
        if self._want is not ALONE:
            ensure_able(store, [self.wanted], f"{type(self).__name__}()")
        report: Any = defaults.on_event
        more: dict[str, Any] = {}
        if report is not None:
            more["on_event"] = lambda name, **facts: report(name, self, store, **facts)
        if task is not None:
            return TaskHold(task, store, self.wanted, self._terms, **more)
        label = threading.current_thread().name
        return Hold(store, self.wanted, self._terms, label=label, **more)


# Python uses this name in errors about arguments; `AsyncLock` has its own.
KeyLock.__init__.__qualname__ = "Lock.__init__"


def key_wanted(kind: str, key: Any, capacity: Any, weight: Any, shared: Any, rate: Any) -> Key:
    """Return the key of a lock's arguments; annotations do not keep callers from passing others."""
    if isinstance(key, Key):
        if (capacity, weight, shared, rate) != (1, 1, False, None):
            raise ConfigurationError(
                f"{kind}({key!r}): the Key has its own terms; capacity, weight, shared and rate"
                " go with a text"
            )
        if key.order is not None:
            raise ConfigurationError(
                f"{kind}({key!r}): order is for tasks, whose calls wait in the store; leave it out."
                f" A {kind} that waits for a key of such tasks is in a lane of its own"
            )
        return key
    if not isinstance(key, str) or not key:
        raise ConfigurationError(f"{kind}() takes a non-empty text or a Key, not {key!r}")
    return Key(key, capacity=capacity, weight=weight, shared=shared, rate=rate)


def report_conflict(hold: Hold, reply: Reply) -> None:
    """Report that *hold* was not granted."""
    hold.on_event("lock_conflict", key=hold.key, holder=reply.holder, remaining=reply.remaining)


def with_an_apps_prefix(named: Store, known: Iterable[Store]) -> Store:
    """Return the one of *known*, the apps' stores, at the address of *named*, or else *named*."""
    place = named.address
    stores = {store.identity: store for store in known if store.address == place}
    if len(stores) > 1:
        prefixes = ", ".join(sorted(identity.rpartition("#")[2] for identity in stores))
        raise ConfigurationError(
            f"several apps lock at {place}, with the prefixes {prefixes}: call"
            " app.set_current(), or name one: Lock(..., prefix=...), open_store(url, prefix)"
        )
    return next(iter(stores.values()), named)
