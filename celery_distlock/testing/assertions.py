"""Assertions about keys and parked tasks; their messages describe the state that was found."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import count
from typing import Any, NoReturn

from celery import Task

from celery_distlock import clock
from celery_distlock.engine.acquisition import defaults
from celery_distlock.engine.key_locks import with_an_apps_prefix
from celery_distlock.key import Key
from celery_distlock.naming import PARKED, is_resting
from celery_distlock.stores import Ability, ListingStore, QueueStore, Store, open_store
from celery_distlock.stores.identities import Owner, task_id_of
from celery_distlock.stores.values import Holder, KeyState, Waiter

__all__ = ["assert_free", "assert_locked", "assert_parked", "assert_units"]

PAGE = 100  # waiters in one request
SHOWN = 5  # waiters, and holders, named in a message
POLL = 0.02  # seconds


def assert_locked(key: str | Key, store: Store | str | None = None, *, within: float = 0.0) -> None:
    """
    Fail unless *key* is held.

    Args:
        key: The key, or a :class:`~celery_distlock.Key`, as returned by a task's `key_for`.
        store: A URL, a store, or None for the store of the current app. The URL of an app's locks
            implies that app's prefix, as for a :class:`~celery_distlock.Lock`.
        within: Real seconds to wait until the assertion holds.

    Raises:
        AssertionError: The key has no holder. The message lists its waiters.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: bool(place.inspect(key).token), within):
        _fail(f"{key!r} is not locked: {_situation(place, key)}")


def assert_free(key: str | Key, store: Store | str | None = None, *, within: float = 0.0) -> None:
    """
    Fail if *key* is held; arguments as for :func:`assert_locked`.

    Raises:
        AssertionError: The key is held. The message lists its holders, since when they hold it, and
            its waiters.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: not place.inspect(key).token, within):
        _fail(f"{key!r} is not free: {_situation(place, key)}")


def assert_units(
    key: str | Key, units: int, store: Store | str | None = None, *, within: float = 0.0
) -> None:
    """
    Fail unless exactly *units* units of *key* are in use by the holders that share it.

    Units that are reserved for a dispatched task, and units that rest, are in use as well. Other
    arguments as for :func:`assert_locked`.

    Raises:
        AssertionError: Another number is in use. The message has that number, and lists the holders
            and waiters.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: place.inspect(key).used == units, within):
        state = place.inspect(key)
        exclusive = state.token and not state.holders
        used = "it is held exclusively" if exclusive else f"{state.used} are"
        what = "unit of" if units == 1 else "units of"
        _fail(f"not {units} {what} {key!r} in use, {used}: {_situation(place, key)}")


def assert_parked(
    task: Any,
    key: str | Key | None = None,
    store: Store | str | None = None,
    *,
    within: float = 0.0,
) -> None:
    """
    Fail unless *task* is parked: in the queue of a key, and its turn has not come.

    Args:
        task: A task's id or its result; or a task, for any call of it.
        key: The key at which it is parked. With an id, None means any key. With a task, the key is
            required.
        store: As for :func:`assert_locked`.
        within: Real seconds to wait. A worker takes a moment to receive a task and to park it.

    Raises:
        AssertionError: The task is not parked. The message lists the key's holders and waiters.
        TypeError: *task* is a task, and no *key* is given.
    """
    __tracebackhide__ = True
    key, place = None if key is None else _text(key), _store(store)
    if key is None and isinstance(task, Task):
        raise TypeError(f"assert_parked({task.name}) needs the key, or the id of one call")
    wanted, what = _wanted(task)

    def is_parked() -> bool:
        parked = QueueStore.of(place).parking.find_parked(what) if key is None else [(key, "")]
        return any(wanted(waiter) for each, _ in parked for waiter in _all_waiters(place, each))

    if not _comes_true(is_parked, within):
        situation = "its id is in no key's queue" if key is None else _situation(place, key)
        _fail(f"task {what} is not parked{f' at {key!r}' if key else ''}: {situation}")


def _text(key: str | Key) -> str:
    return key.template if isinstance(key, Key) else key


def _wanted(task: Any) -> tuple[Callable[[Waiter], bool], str]:
    """Return a predicate for parked waiters of *task*, and the task's name or id."""
    if isinstance(task, Task):
        name = str(task.name)
        return lambda waiter: _is_parked(waiter) and waiter.task == name, name
    identity = task if isinstance(task, str) else str(task.id)
    return (
        lambda waiter: _is_parked(waiter) and task_id_of(waiter.run) == identity,
        identity,
    )


def _is_parked(waiter: Waiter) -> bool:
    return bool(waiter.run) and not waiter.woken


def _store(store: Store | str | None) -> Store:
    if store is None:
        return defaults.store()
    if isinstance(store, str):
        return with_an_apps_prefix(open_store(store), defaults.stores())
    return store


def _comes_true(fact: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while not fact():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL)
    return True


def _fail(message: str) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError(message)


def _all_waiters(store: Store, key: str) -> Iterator[Waiter]:
    listing = ListingStore.of(store)
    for page in count():
        found = listing.waiters(key, first=page * PAGE, limit=PAGE)
        yield from found
        if len(found) < PAGE:
            return


def _situation(store: Store, key: str) -> str:
    """Describe the holders of *key*, since when they hold it, and its waiters."""
    state = store.inspect(key)
    return f"{_holder(state)}; {_queue(store, key, state)}"


def _holder(state: KeyState) -> str:
    if not state.token:
        return "it has no holder"
    if state.holders:
        return _holders(state)
    return (
        f"{held_by(state.owner)}{_since(state.since)}, token {state.token},"
        f" {state.remaining:.1f} s left"
    )


def _holders(state: KeyState) -> str:
    named = [_describe_holder(holder) for holder in state.holders[:SHOWN]]
    more = len(state.holders) - len(named)
    of = f" of {state.capacity}" if state.capacity else ""
    rests = f"; no grants for {state.rest:.1f} s" if state.rest else ""
    return (
        f"{state.used}{of} units are held, by {', '.join(named)}"
        f"{f' and {more} more' if more else ''}, token {state.token}{rests}"
    )


def _describe_holder(holder: Holder) -> str:
    units = f", {holder.units} units" if holder.units > 1 else ""
    return f"{_describe(holder.owner)}{_since(holder.since)}{units}"


def _queue(store: Store, key: str, state: KeyState) -> str:
    if Ability.LIST not in store.abilities:
        return f"{state.waiting} waiting" if state.waiting else "no waiters"
    waiting = ListingStore.of(store).waiters(key, limit=SHOWN)
    if not waiting:
        return "no waiters"
    names = [_describe_waiter(waiter) for waiter in waiting]
    more = state.waiting - len(names)
    return f"waiting: {', '.join(names)}{f' and {more} more' if more > 0 else ''}"


def _describe_waiter(waiter: Waiter) -> str:
    if not waiter.run:
        return f"{_describe(waiter.owner)}{_since(waiter.since)}"
    state = "woken" if waiter.woken else "parked"
    return f"{waiter.task or 'task'}[{task_id_of(waiter.run)}] ({state}{_since(waiter.since)})"


def held_by(owner: str) -> str:
    """Return a clause for people: which owner holds a key."""
    if is_resting(owner):
        return "it rests"
    if owner.startswith(PARKED):
        return f"it is reserved for {_describe(owner)}"
    return f"{_describe(owner)} holds it"


def _describe(owner: str) -> str:
    """Return *owner* for people: label, process and host."""
    if is_resting(owner):
        return "a rest (min_hold or cooldown)"
    if owner.startswith(PARKED):
        return f"the woken task {task_id_of(owner.removeprefix(PARKED))}"
    known = Owner.parse(owner)
    return owner if known is None else f"{known.label} (pid {known.pid} on {known.host})"


def _since(moment: float) -> str:
    if not moment:
        return ""
    when = datetime.fromtimestamp(moment).astimezone()
    return f" since {when:%H:%M:%S} ({max(0.0, clock.wall() - moment):.1f} s)"
