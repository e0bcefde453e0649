"""Snapshots of all keys, shared by all viewers of the page."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

from starlette.concurrency import run_in_threadpool

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.ops.admin import Admin
from celery_distlock.stores import ListingStore
from celery_distlock.stores.values import KeyState

from .history import History

MOST_KEYS = 200_000  # in a snapshot; about 200 MB, and ten seconds of the store's time
PATIENCE = 1.0  # seconds that a request waits for a new snapshot if there is an older one
LATE = 2.0  # seconds after which the page reports that the store has not answered yet
REST = 3.0  # the pause after a snapshot, as a multiple of its duration


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The keys at one time.

    Attributes:
        locks: The keys, sorted by name.
        at: When it was taken, in seconds since the epoch.
        whole: False if there are more than `MOST_KEYS`, or a part of the store did not answer.
    """

    locks: list[KeyState]
    at: float
    whole: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """
    The keys to show.

    Attributes:
        text: A part of the key, or of a holder's task, task id or host, ignoring case; or a pattern
            for the key, as in :mod:`fnmatch`.
        sort: One of `COLUMNS`.
        descending: Show the greatest first.
        limit: The most keys to show.
    """

    text: str
    sort: str
    descending: bool
    limit: int

    def of(self, locks: Iterable[KeyState]) -> tuple[list[KeyState], int]:
        """Return the first matching *locks*, and the number of all matching ones."""
        found = [lock for lock in locks if self._matches(lock)] if self.text else list(locks)
        found.sort(key=COLUMNS[self.sort], reverse=self.descending)
        return found[: self.limit], len(found)

    def _matches(self, lock: KeyState) -> bool:
        wanted = self.text.casefold()
        words = [lock.key]
        for hold in lock.holds:
            words += hold.who.task, hold.who.task_id, hold.who.host
        return any(wanted in word.casefold() for word in words) or fnmatchcase(lock.key, self.text)


def _of_holder(name: str) -> Callable[[KeyState], str]:
    return lambda lock: str(getattr(lock.holder, name)) if lock.holder else ""


COLUMNS: dict[str, Callable[[KeyState], Any]] = {
    "key": lambda lock: lock.key,
    "task": _of_holder("task"),
    "host": _of_holder("host"),
    "held": lambda lock: -lock.since if lock.since else -float("inf"),
    "lease": lambda lock: lock.remaining if lock.holder else float("inf"),
    "units": lambda lock: lock.units,
    "token": lambda lock: lock.token,
    "waiting": lambda lock: lock.waiting + lock.woken,
}


class SnapshotCache:
    """
    Takes snapshots of the store on demand, at most one per *interval* seconds.

    A store with very many keys is read less often: the next snapshot begins after three times the
    duration of the last one or later. Until then, all requests get the last one.
    """

    def __init__(self, admin: Admin, interval: float) -> None:
        self._admin = admin
        self._interval = interval
        self._last: Snapshot | None = None
        self._error: StoreError | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._due = 0.0
        self._changed = False
        self._began = 0.0  # start of the snapshot in progress
        self._took = 0.0  # duration of the last snapshot in seconds
        self.history = History()

    @property
    def late(self) -> float:
        """Seconds that the snapshot in progress has taken, if that is unusually long; else 0."""
        if self._refreshing is None:
            return 0.0
        taken = clock.monotonic() - self._began
        return taken if taken > max(LATE, REST * self._took) else 0.0

    async def latest(self) -> Snapshot:
        """
        Return the latest snapshot, after taking a new one if it is due.

        Raises:
            StoreError: The last attempt to take one failed.
        """
        if self._refreshing is None and (self._changed or clock.monotonic() >= self._due):
            self._changed = False
            self._refreshing = asyncio.create_task(self._refresh())
        refreshing = self._refreshing
        if refreshing is not None:
            known = self._last is not None or self._error is not None
            await asyncio.wait([refreshing], timeout=PATIENCE if known else None)
            if refreshing.done():
                refreshing.result()
        if self._error is not None:
            raise self._error
        assert self._last is not None
        return self._last

    def changed(self) -> None:
        """Make the next request take a new snapshot."""
        self._changed = True

    async def _refresh(self) -> None:
        began = self._due = self._began = clock.monotonic()
        try:
            self._last = await run_in_threadpool(self._take)
            self._error = None
            now = clock.monotonic()
            self._took = now - began
            self._due = now + max(self._interval / 2, REST * self._took)
        except StoreError as error:
            self._error = error
        finally:
            self._refreshing = None

    def _take(self) -> Snapshot:
        at, locks = clock.wall(), self._admin.locks()
        store = ListingStore.of(self._admin.store)
        left_out = store.left_out
        found = sorted(islice(locks, MOST_KEYS), key=COLUMNS["key"])
        whole = next(locks, None) is None and store.left_out == left_out
        self.history.note_all(found, at, whole=whole)
        return Snapshot(found, at, whole=whole)
