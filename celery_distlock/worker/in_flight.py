"""
The unfinished tasks of this worker by key, and calls that wait for them.

- A task is entered when it goes to the pool, and left out as soon as Celery has forgotten it.
- `DeferredCalls` polls, because Celery does not report every begin and end of a task.
"""

import collections
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state

__all__ = ["DeferredCalls", "InFlightKeys", "in_flight"]

logger = logging.getLogger(__name__)

# Seconds between polls of whether a task has finished, while another waits for that; longer and
# longer while none has.
POLL, MAX_POLL = 0.01, 0.1


class InFlightKeys:
    """
    The ids of this worker's unfinished tasks, by the slot name of their key.

    Attributes:
        followers: The ids of woken tasks that wait for earlier tasks of their key to begin.
    """

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        self._next_purge = 1000
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self.followers: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether there is such a task."""
        return bool(self.ids(name))

    def has_queued(self, name: str, but: str = "") -> bool:
        """Whether one of them, other than the one whose id is *but*, waits for a slot."""
        for identity in self.ids(name) - {but}:
            request = state.requests.get(identity)
            if request is not None and request not in state.active_requests:
                return True
        return False

    def ids(self, name: str) -> set[str]:
        """Return the ids of such tasks."""
        with self._mutex:
            known = self._ids.get(name)
            if known is None:
                return set()
            known.intersection_update(state.requests)
            return known.copy()

    def add(self, name: str, identity: str) -> None:
        """Enter a task that goes to the pool, for the key of that slot name."""
        with self._mutex:
            known = self._ids.setdefault(name, set())
            known.add(identity)
            if len(known) + len(self._ids) > self._next_purge:
                self._purge()

    def add_all(self, names: Iterable[str], identity: str) -> None:
        """Likewise, for several keys."""
        for name in names:
            self.add(name, identity)

    def _purge(self) -> None:
        unfinished = {name: ids.intersection(state.requests) for name, ids in self._ids.items()}
        self._ids = {name: ids for name, ids in unfinished.items() if ids}
        self._next_purge = max(1000, 4 * len(self._ids))


in_flight = InFlightKeys()


class DeferredCalls:
    """
    Calls that wait for other tasks of their key, one after the other for each key.

    Args:
        timer: The worker's.
        busy: Whether such a task is left, by the key's slot name.
    """

    def __init__(self, timer: Any, busy: Callable[[str], bool]) -> None:
        self._timer = timer
        self._busy = busy
        self._waiting: dict[str, collections.deque[Callable[[], object]]] = {}
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self._polls = False
        self._pause = POLL
        self._closed = False

    def has(self, name: str) -> bool:
        """Whether a call waits at the key of that slot name."""
        return name in self._waiting

    def put(self, name: str, call: Callable[[], object]) -> None:
        """Have *call* done when no task is in its way, after the calls before it."""
        with self._mutex:
            self._waiting.setdefault(name, collections.deque()).append(call)
            begins, self._polls = not self._polls, True
            self._pause = POLL
        if begins:
            self._poll_later()

    def close(self) -> None:
        """Forget all that waits."""
        self._closed = True
        self._waiting.clear()

    def _poll_later(self) -> None:
        self._timer.call_after(self._pause, self._poll)

    def _poll(self) -> None:
        self._pause = min(1.5 * self._pause, MAX_POLL)
        for name in list(self._waiting):
            if not self._busy(name):
                self._call_next(name)
                self._pause = POLL
        with self._mutex:
            self._polls = bool(self._waiting) and not self._closed
        if self._polls:
            self._poll_later()

    def _call_next(self, name: str) -> None:
        with self._mutex:
            calls = self._waiting.get(name)
            if not calls:
                return
            call = calls.popleft()
            if not calls:
                del self._waiting[name]
        try:
            call()
        except Exception:
            logger.exception(
                "unexpected error while starting a task that waited at %r; the sweeper sends it",
                name,
            )
