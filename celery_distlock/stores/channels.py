"""Where a store tells a blocked caller, or a worker, that it is its turn."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from celery_distlock import clock

__all__ = ["DeliveryChannel", "EventInbox", "Inbox", "PollingInbox"]


class Inbox(ABC):
    """
    Where one waiter learns that the key may be its own.

    A thread blocks in :meth:`wait`. A coroutine does not: it asks :meth:`on_push` for a call, and
    :meth:`next_look` for the time after which to look without one. What is here of these two is
    right for an inbox where nothing is pushed: its waiter looks after short and growing pauses.
    """

    FIRST, LAST = 0.01, 0.25  # seconds

    address: str
    _pause = FIRST

    def on_push(self, call: Callable[[], object]) -> None:
        """Have *call* called, in any thread, whenever something comes or may have come."""
        return  # nothing ever comes

    def next_look(self, timeout: float) -> float:
        """
        Return the seconds, *timeout* at most, after which to look though nothing was pushed.

        Called in a thread, after each look in vain; may take a moment.
        """
        pause, self._pause = self._pause, min(2 * self._pause, self.LAST)
        return min(timeout, pause * clock.jitter(0.5, 1.0))

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when something has come, or after *timeout* seconds; never certain of either."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Idempotent."""


class PollingInbox(Inbox):
    """An inbox where nothing is pushed: its waiter looks again after short and growing pauses."""

    def __init__(self, address: str) -> None:
        self.address = address

    def wait(self, timeout: float) -> None:
        time.sleep(self.next_look(timeout))

    def close(self) -> None:
        """Nothing was opened."""


class EventInbox(Inbox):
    """An inbox that is called, in this process, whenever there is something to look at."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.event = threading.Event()
        self._on_push: Callable[[], object] | None = None

    def call(self) -> None:
        """Wake who waits."""
        self.event.set()
        if self._on_push is not None:
            self._on_push()

    def on_push(self, call: Callable[[], object]) -> None:
        self._on_push = call

    def next_look(self, timeout: float) -> float:
        return timeout


class DeliveryChannel(ABC):
    """Where a worker takes parked runs whose turn it is, without a way through the broker."""

    address: str

    @abstractmethod
    def close(self) -> None:
        """Take no more. Idempotent."""
