"""Where a store tells a blocked caller, or a worker, that it is its turn."""

import time
from abc import ABC, abstractmethod

from celery_distlock import clock

__all__ = ["DeliveryChannel", "Inbox", "PollingInbox"]


class Inbox(ABC):
    """Where one blocked waiter learns that the key may be its own."""

    address: str

    @abstractmethod
    def wait(self, timeout: float) -> None:
        """Return when something has come, or after *timeout* seconds; never certain of either."""

    @abstractmethod
    def close(self) -> None:
        """Stop listening. Idempotent."""


class PollingInbox(Inbox):
    """An inbox where nothing is pushed: its waiter looks again after short and growing pauses."""

    FIRST, LAST = 0.01, 0.25  # seconds

    def __init__(self, address: str) -> None:
        self.address = address
        self._pause = self.FIRST

    def wait(self, timeout: float) -> None:
        time.sleep(min(timeout, self._pause * clock.jitter(0.5, 1.0)))
        self._pause = min(2 * self._pause, self.LAST)

    def close(self) -> None:
        """Nothing was opened."""


class DeliveryChannel(ABC):
    """Where a worker takes parked runs whose turn it is, without a way through the broker."""

    address: str

    @abstractmethod
    def close(self) -> None:
        """Take no more. Idempotent."""
