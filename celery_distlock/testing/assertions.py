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
from celery_distlock.naming import is_resting
from celery_distlock.stores import Ability, ListingStore, QueueStore, Store, open_store
from celery_distlock.stores.identities import Owner, task_id_of
from celery_distlock.stores.values import Holder, KeyState, Waiter

__all__ = ["assert_free", "assert_locked", "assert_parked", "assert_units"]

PAGE = 100  # waiters a look
SHOWN = 5  # waiters, and holders, that a message names
POLL = 0.02  # seconds


def assert_locked(key: str | Key, store: Store | str | None = None, *, within: float = 0.0) -> None:
    """
    Fail unless somebody holds *key*.

    Args:
        key: The key, or a :class:`~celery_distlock.Key` of it, as a task's `key_for` returns it.
        store: A URL, a store, or None for the current app's. A URL that is where an app locks means
            that app's prefix, as it does for a :class:`~celery_distlock.Lock`.
        within: Real seconds in which it may still come true.

    Raises:
        AssertionError: Nobody holds it; the message says who waits for it.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: bool(place.inspect(key).token), within):
        _fail(f"{key!r} is not locked: {_situation(place, key)}")


def assert_free(key: str | Key, store: Store | str | None = None, *, within: float = 0.0) -> None:
    """
    Fail if anybody holds *key*; arguments as for :func:`assert_locked`.

    Raises:
        AssertionError: The message says who holds it, since when, and who waits for it.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: not place.inspect(key).token, within):
        _fail(f"{key!r} is not free: {_situation(place, key)}")


def assert_units(
    key: str | Key, units: int, store: Store | str | None = None, *, within: float = 0.0
) -> None:
    """
    Fail unless so many *units* of *key* are in use, by those who hold it beside each other.

    What is kept for a task on its way, and what rests, is in use as well. Other arguments as for
    :func:`assert_locked`.

    Raises:
        AssertionError: The message says how many are, and who holds it or waits for it.
    """
    __tracebackhide__ = True
    key, place = _text(key), _store(store)
    if not _comes_true(lambda: place.inspect(key).used == units, within):
        state = place.inspect(key)
        used = "it is held alone" if state.token and not state.holders else f"{state.used} are"
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
    Fail unless *task* is parked: in a key's queue, and its turn has not come.

    Args:
        task: A task's id, or its result; or a task, for any call of it.
        key: The key that it is parked at; a task needs one, for an id None stands for any.
        store: As for :func:`assert_locked`.
        within: Likewise. A worker takes a moment to receive a task and to park it.

    Raises:
        AssertionError: The message says who holds the key and who waits for it.
        TypeError: *task* is a task, and no *key* is given.
    """
    __tracebackhide__ = True
    key, place = None if key is None else _text(key), _store(store)
    if key is None and isinstance(task, Task):
        raise TypeError(f"assert_parked({task.name}) needs the key, or the id of one call")
    wanted, what = _wanted(task)

    def is_parked() -> bool:
        keys = [key] if key is not None else _keys_of_parked(place, what)
        return any(wanted(waiter) for each in keys for waiter in _all_waiters(place, each))

    if not _comes_true(is_parked, within):
        situation = "its id is in no key's queue" if key is None else _situation(place, key)
        _fail(f"task {what} is not parked{f' at {key!r}' if key else ''}: {situation}")


def _text(key: str | Key) -> str:
    return key.template if isinstance(key, Key) else key


def _keys_of_parked(store: Store, task_id: str) -> list[str]:
    return [key for key, _ in QueueStore.of(store).parking.find_parked(task_id)]


def _wanted(task: Any) -> tuple[Callable[[Waiter], bool], str]:
    """Return a test for a parked waiter that is *task*, and the task's name or id."""
    if isinstance(task, Task):
        name = str(task.name)
        return lambda waiter: _is_parked(waiter) and _name(waiter) == name, name
    identity = task if isinstance(task, str) else str(task.id)
    return (
        lambda waiter: _is_parked(waiter) and task_id_of(waiter.run) == identity,
        identity,
    )


def _is_parked(waiter: Waiter) -> bool:
    return bool(waiter.run) and not waiter.woken


def _name(waiter: Waiter) -> str:
    return waiter.task


def _store(store: Store | str | None) -> Store:
    if store is None:
        return defaults.store()
    return with_an_apps_prefix(open_store(store)) if isinstance(store, str) else store


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
    """Say who holds *key*, since when, and who waits for it."""
    state = store.inspect(key)
    return f"{_holder(state)}; {_queue(store, key, state)}"


def _holder(state: KeyState) -> str:
    if not state.token:
        return "nobody holds it"
    if state.holders:
        return _holders(state)
    return (
        f"{describe(state.owner)} holds it{_since(state.since)}, token {state.token},"
        f" {state.remaining:.1f} s left"
    )


def _holders(state: KeyState) -> str:
    named = [_describe_holder(holder) for holder in state.holders[:SHOWN]]
    more = len(state.holders) - len(named)
    of = f" of {state.capacity}" if state.capacity else ""
    rests = f"; nobody enters for {state.rest:.1f} s" if state.rest else ""
    return (
        f"{state.used}{of} units are held, by {', '.join(named)}"
        f"{f' and {more} more' if more else ''}, token {state.token}{rests}"
    )


def _describe_holder(holder: Holder) -> str:
    units = f", {holder.units} units" if holder.units > 1 else ""
    return f"{describe(holder.owner)}{_since(holder.since)}{units}"


def _queue(store: Store, key: str, state: KeyState) -> str:
    if Ability.LIST not in store.abilities:
        return f"{state.waiting} waiting" if state.waiting else "nobody waits"
    waiting = ListingStore.of(store).waiters(key, limit=SHOWN)
    if not waiting:
        return "nobody waits"
    names = [_describe_waiter(waiter) for waiter in waiting]
    more = state.waiting - len(names)
    return f"waiting: {', '.join(names)}{f' and {more} more' if more > 0 else ''}"


def _describe_waiter(waiter: Waiter) -> str:
    if not waiter.run:
        return f"{describe(waiter.owner)}{_since(waiter.since)}"
    state = "woken" if waiter.woken else "parked"
    return f"{_name(waiter) or 'task'}[{task_id_of(waiter.run)}] ({state}{_since(waiter.since)})"


def describe(owner: str) -> str:
    """Return *owner* for people: label, process and host."""
    if is_resting(owner):
        return "nobody, for it rests,"
    if owner.startswith("parked:"):
        return f"the parked task {task_id_of(owner.removeprefix('parked:'))}, whose turn it is,"
    known = Owner.parse(owner)
    return owner if known is None else f"{known.label} (pid {known.pid} on {known.host})"


def _since(moment: float) -> str:
    if not moment:
        return ""
    when = datetime.fromtimestamp(moment).astimezone()
    return f" since {when:%H:%M:%S} ({max(0.0, clock.wall() - moment):.1f} s)"
