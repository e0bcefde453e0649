"""Which unfinished tasks of this worker are for which key, and who comes after them."""

import collections
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state

__all__ = ["ElderQueue", "InFlightKeys", "in_flight"]

logger = logging.getLogger(__name__)

# Seconds between looks at whether a task has finished, while another waits for that; longer and
# longer while none has.
LOOK, LAST_LOOK = 0.01, 0.1


class InFlightKeys:
    """Which unfinished tasks of this worker are for which key, by its slot name."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        self._next_purge = 1000
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self.followers: set[str] = set()  # ids of woken tasks that come after their neighbours

    def have(self, name: str) -> bool:
        """Whether there is such a task."""
        return bool(self.of(name))

    def queue(self, name: str, but: str = "") -> bool:
        """Whether one of them, other than the one whose id is *but*, waits for a slot."""
        for identity in self.of(name) - {but}:
            request = state.requests.get(identity)
            if request is not None and request not in state.active_requests:
                return True
        return False

    def of(self, name: str) -> set[str]:
        """Return the ids of such tasks."""
        with self._mutex:
            known = self._ids.get(name)
            if known is None:
                return set()
            known.intersection_update(state.requests)
            return known.copy()

    def add(self, name: str, identity: str) -> None:
        """Note that a task goes to the pool, and is for the key of that name."""
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


class ElderQueue:
    """
    Calls what is to come after other tasks of a key, one call after the other.

    Celery does not tell of every task that it has begun or finished, so while something waits here
    it is looked at again and again.

    Args:
        timer: The worker's.
        busy: Whether there are such tasks still, by the key's slot name.
    """

    def __init__(self, timer: Any, busy: Callable[[str], bool]) -> None:
        self._timer = timer
        self._busy = busy
        self._waiting: dict[str, collections.deque[Callable[[], object]]] = {}
        self._mutex = threading.Lock()  # without an event loop there are several threads here
        self._looks = False
        self._pause = LOOK
        self._closed = False

    def wait(self, name: str) -> bool:
        """Whether somebody waits at the key of that name."""
        return name in self._waiting

    def put(self, name: str, call: Callable[[], object]) -> None:
        """Have *call* done when those before it have got so far."""
        with self._mutex:
            self._waiting.setdefault(name, collections.deque()).append(call)
            begins, self._looks = not self._looks, True
            self._pause = LOOK
        if begins:
            self._look_later()

    def close(self) -> None:
        """Forget all that waits."""
        self._closed = True
        self._waiting.clear()

    def _look_later(self) -> None:
        self._timer.call_after(self._pause, self._look)

    def _look(self) -> None:
        self._pause = min(1.5 * self._pause, LAST_LOOK)
        for name in list(self._waiting):
            if not self._busy(name):
                self._call_next(name)
                self._pause = LOOK
        with self._mutex:
            self._looks = bool(self._waiting) and not self._closed
        if self._looks:
            self._look_later()

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
            logger.exception("something went wrong with a task that had waited; others go on")
