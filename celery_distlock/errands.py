"""
Gives back, in the background, what may or may not have been taken.

For a request whose outcome is unknown when its caller has to go on. A thread of its own, begun when
it is first needed, so that a store that hangs holds up nothing else.
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

from . import clock
from .errors import StoreError
from .stores.base import Ended, Inbox, Store

__all__ = ["give_back"]

logger = logging.getLogger(__name__)

PAUSES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # seconds between attempts
LAST_MOMENT = 1.0  # seconds that the end of the process waits for what is still to be given back
ANSWERS = 2  # the request itself may still be in a socket when the first release is answered


@dataclass(order=True)
class _Errand:
    due: float
    number: int
    store: Store = field(compare=False)
    key: str = field(compare=False)
    owner: str = field(compare=False)
    run: str = field(compare=False)
    ended: Ended = field(compare=False)
    inbox: Inbox | None = field(default=None, compare=False)
    on_done: Callable[[], None] | None = field(default=None, compare=False)
    attempts: int = field(default=0, compare=False)
    answers: int = field(default=0, compare=False)
    unfinished: bool = field(default=True, compare=False)


class _Errands:
    def __init__(self) -> None:
        # C code, that a time limit's exception cannot leave locked.
        self._new: queue.SimpleQueue[_Errand] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._unfinished: set[int] = set()

    def add(self, *errand: Any) -> None:
        made = _Errand(clock.monotonic(), next(self._numbers), *errand)
        self._unfinished.add(made.number)
        self._new.put(made)
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="distlock-errands", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        waiting: list[_Errand] = []
        while True:
            pause = max(0.0, waiting[0].due - clock.monotonic()) if waiting else None
            try:
                heapq.heappush(waiting, self._new.get(timeout=pause))
                continue
            except queue.Empty:
                errand = heapq.heappop(waiting)
            try:
                self._attempt(errand)
            except Exception:
                logger.exception("giving %r back went wrong; its lease ends it", errand.key)
                errand.unfinished = False
            if errand.unfinished:
                heapq.heappush(waiting, errand)
            else:
                self._unfinished.discard(errand.number)
            del errand  # or whoever waited there would be kept until the next one comes

    def finish(self) -> None:
        """Let it be done, but for a moment only."""
        until = clock.monotonic() + LAST_MOMENT
        while self._unfinished and clock.monotonic() < until:
            time.sleep(0.01)

    def _attempt(self, errand: _Errand) -> None:
        try:
            released = errand.store.release(
                errand.key,
                errand.owner,
                run=errand.run,
                ended=errand.ended,
                inbox=errand.inbox,
            )
        except StoreError as error:
            logger.debug("%r is not given back yet: %s", errand.key, error)
        else:
            errand.answers += 1
            errand.store.dispatch(released.wake)
        errand.unfinished = errand.answers < ANSWERS and errand.attempts < len(PAUSES)
        if errand.unfinished:
            errand.due = clock.monotonic() + PAUSES[errand.attempts]
            errand.attempts += 1
        elif errand.on_done is not None:
            errand.on_done()


def give_back(
    store: Store,
    key: str,
    owner: str,
    *,
    run: str = "",
    ended: Ended = Ended.NO,
    inbox: Inbox | None = None,
    on_done: Callable[[], None] | None = None,
) -> None:
    """
    Release *key*, if *owner* has it or comes to have it, until the store has answered.

    The arguments are those of :meth:`Store.release`; *on_done* is called when it has, or when
    there is nothing more to try.
    """
    _errands.add(store, key, owner, run, ended, inbox, on_done)


def _after_fork() -> None:
    global _errands  # noqa: PLW0603  # the parent's thread does not run in a forked child
    _errands = _Errands()


_errands = _Errands()
os.register_at_fork(after_in_child=_after_fork)


def _at_exit() -> None:
    _errands.finish()


atexit.register(_at_exit)
