"""Inboxes that notify blocked callers of their turn, and channels that push runs to workers."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from celery_distlock import clock

__all__ = ["DeliveryChannel", "EventInbox", "Inbox", "PollingInbox"]


class Inbox(ABC):
    """
    Notifies one waiter that it may now be granted the key.

    A thread blocks in :meth:`wait`. A coroutine does not block: it registers a callback with
    :meth:`on_push`, and learns from :meth:`next_look` when to look without a call. The defaults of
    these two suit an inbox where nothing is pushed: its waiter looks after short, growing pauses.
    """

    FIRST, LAST = 0.01, 0.25  # seconds

    address: str
    _pause = FIRST

    def on_push(self, call: Callable[[], object]) -> None:
        """Register *call*: it is called in any thread when something was, or may be, pushed."""
        return  # nothing is ever pushed

    def next_look(self, timeout: float) -> float:
        """
        Return the seconds, at most *timeout*, after which to look even if nothing was pushed.

        Called in a thread, after each unsuccessful look; may block for a moment.
        """
        pause, self._pause = self._pause, min(2 * self._pause, self.LAST)
        return min(timeout, pause * clock.jitter(0.5, 1.0))

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when something was pushed or after *timeout* seconds, or earlier for no reason."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Idempotent."""


class PollingInbox(Inbox):
    """An inbox where nothing is pushed: its waiter looks again after short, growing pauses."""

    def __init__(self, address: str) -> None:
        self.address = address

    def wait(self, timeout: float) -> None:
        time.sleep(self.next_look(timeout))

    def close(self) -> None:
        """Do nothing, since nothing was opened."""


class EventInbox(Inbox):
    """An inbox that is notified by a call in this process."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.event = threading.Event()
        self._on_push: Callable[[], object] | None = None

    def call(self) -> None:
        """Wake the waiter."""
        self.event.set()
        if self._on_push is not None:
            self._on_push()

    def on_push(self, call: Callable[[], object]) -> None:
        self._on_push = call

    def next_look(self, timeout: float) -> float:
        return timeout


class DeliveryChannel(ABC):
    """Receives parked runs whose turn has come, in a worker, without the broker."""

    address: str

    @abstractmethod
    def close(self) -> None:
        """Stop receiving. Idempotent."""
