"""
Gives back, in the background, what may or may not have been taken.

For a request whose outcome is unknown when its caller has to go on. Each store has a thread for
that as long as there is something to do, so that one that hangs holds up nothing else.
"""

import atexit
import heapq
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.naming import shown
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Completion, Inbox, Store

__all__ = ["release_later"]

logger = logging.getLogger(__name__)

PAUSES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # seconds between attempts
LAST_MOMENT = 1.0  # seconds that the end of the process waits for what is still to be given back
IDLE = 5.0  # seconds that a thread waits for another errand before it ends
ANSWERS = 2  # the request itself may still be in a socket when the first release is answered


@dataclass(order=True)
class _PendingRelease:
    due: float
    number: int
    store: Store = field(compare=False)
    key: str = field(compare=False)
    owner: str = field(compare=False)
    run: str = field(compare=False)
    ended: Completion = field(compare=False)
    inbox: Inbox | None = field(default=None, compare=False)
    on_done: Callable[[], None] | None = field(default=None, compare=False)
    attempts: int = field(default=0, compare=False)
    answers: int = field(default=0, compare=False)
    unfinished: bool = field(default=True, compare=False)


def _attempt(errand: _PendingRelease) -> None:
    try:
        released = errand.store.release(
            ReleaseRequest(
                errand.key,
                errand.owner,
                run=errand.run,
                completion=errand.ended,
                inbox=errand.inbox,
            )
        )
    except StoreError as error:
        logger.debug("%r is not given back yet: %s", shown(errand.key), error)
    else:
        errand.answers += 1
        errand.store.dispatch(released.wake)
    errand.unfinished = errand.answers < ANSWERS and errand.attempts < len(PAUSES)
    if errand.unfinished:
        errand.due = clock.monotonic() + PAUSES[errand.attempts]
        errand.attempts += 1
    elif errand.on_done is not None:
        errand.on_done()


class _ReleaseThread:
    """What is to be done at one store, and the thread that does it."""

    def __init__(self, errands: "_PendingReleases", store: Store) -> None:
        self.new: queue.SimpleQueue[_PendingRelease] = queue.SimpleQueue()
        self._errands = errands
        self._store = store  # its id is that of the line: nobody else may get it meanwhile

    def start(self) -> None:
        threading.Thread(target=self._run, name="distlock-errands", daemon=True).start()

    def _run(self) -> None:
        waiting: list[_PendingRelease] = []
        while True:
            pause = max(0.0, waiting[0].due - clock.monotonic()) if waiting else IDLE
            try:
                heapq.heappush(waiting, self.new.get(timeout=pause))
                continue
            except queue.Empty:
                if not waiting:
                    if self._errands.end(self._store, self):
                        return
                    continue
                errand = heapq.heappop(waiting)
            try:
                _attempt(errand)
            except Exception:
                key = shown(errand.key)
                logger.exception("giving %r back went wrong; its lease ends it", key)
                errand.unfinished = False
            if errand.unfinished:
                heapq.heappush(waiting, errand)
            else:
                self._errands.done(errand)
            del errand  # or whoever waited there would be kept until the next one comes


class _PendingReleases:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._mutex = threading.Lock()
        self._lines: dict[int, _ReleaseThread] = {}  # by the store's id
        self._unfinished: set[int] = set()

    def add(self, store: Store, *errand: Any) -> None:
        made = _PendingRelease(clock.monotonic(), next(self._numbers), store, *errand)
        self._unfinished.add(made.number)
        with self._mutex:
            line = self._lines.get(id(store))
            if line is None:
                line = _ReleaseThread(self, store)
                line.start()
                self._lines[id(store)] = line
            line.new.put(made)

    def done(self, errand: _PendingRelease) -> None:
        self._unfinished.discard(errand.number)

    def end(self, store: Store, line: _ReleaseThread) -> bool:
        """Whether *line* has nothing to do, and is forgotten."""
        with self._mutex:
            if not line.new.empty():
                return False
            if self._lines.get(id(store)) is line:
                del self._lines[id(store)]
            return True

    def finish(self) -> None:
        """Let it be done, but for a moment only."""
        until = clock.monotonic() + LAST_MOMENT
        while self._unfinished and clock.monotonic() < until:
            time.sleep(0.01)


def release_later(
    store: Store,
    key: str,
    owner: str,
    *,
    run: str = "",
    ended: Completion = Completion.NO,
    inbox: Inbox | None = None,
    on_done: Callable[[], None] | None = None,
) -> None:
    """
    Release *key*, if *owner* has it or comes to have it, until the store has answered.

    The arguments are those of :meth:`Store.release`; *on_done* is called when it has, or when
    there is nothing more to try.
    """
    _pending.add(store, key, owner, run, ended, inbox, on_done)


def _after_fork() -> None:
    global _pending  # noqa: PLW0603  # the parent's thread does not run in a forked child
    _pending = _PendingReleases()


_pending = _PendingReleases()
os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    _pending.finish()


atexit.register(_at_exit)
