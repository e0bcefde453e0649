"""Snapshots of all keys, taken once for all viewers of the page."""

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

__all__ = ["COLUMNS", "Selection", "Snapshot", "SnapshotCache"]

MOST_KEYS = 200_000  # looked at; about 200 MB, and ten seconds of the store's time
PATIENCE = 1.0  # seconds that one who asks waits for a fresh snapshot where there is an older one
LATE = 2.0  # seconds after which people are told that the store has not answered yet
REST = 3.0  # times as long as a snapshot took, none is taken


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    All keys, as they were.

    Attributes:
        locks: What was found, by key.
        at: When, in seconds since the epoch.
        whole: False if there are more than were looked at, or a part of the store did not answer.
    """

    locks: list[KeyState]
    at: float
    whole: bool


@dataclass(frozen=True, slots=True)
class Selection:
    """
    Which keys are to be shown.

    Attributes:
        text: What the key, or a holder's task, its id or host contains, in any case; or a pattern
            of the key, as :mod:`fnmatch` has it.
        sort: One of `COLUMNS`.
        descending: From the greatest on.
        limit: How many.
    """

    text: str
    sort: str
    descending: bool
    limit: int

    def of(self, locks: Iterable[KeyState]) -> tuple[list[KeyState], int]:
        """Return the first of *locks*, and how many there are; what is equal stays in its order."""
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
    Takes a snapshot of the store when somebody asks, and at most every *interval* seconds.

    A store with very many keys is read less often: for three times as long as a snapshot took,
    everybody gets the last one.
    """

    def __init__(self, admin: Admin, interval: float) -> None:
        self._admin = admin
        self._interval = interval
        self._last: Snapshot | None = None
        self._error: StoreError | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._due = 0.0
        self._changed = False
        self._began = 0.0  # of the look that is being taken
        self._took = 0.0  # seconds, the last one
        self.history = History()

    @property
    def late(self) -> float:
        """Seconds that a look has taken so far, if that is longer than looks take here; or 0."""
        if self._refreshing is None:
            return 0.0
        taken = clock.monotonic() - self._began
        return taken if taken > max(LATE, REST * self._took) else 0.0

    async def latest(self) -> Snapshot:
        """
        Return a snapshot: a new one if it is time for that.

        Raises:
            StoreError: The last attempt to take one has failed.
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
        """Have a new snapshot taken at the next request."""
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
