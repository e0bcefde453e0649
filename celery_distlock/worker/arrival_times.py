"""
Arrival times of messages by the lock store's clock, by which the tasks at a key are ordered.

- Each is later than the one before, of the same worker.
- It is behind the store's clock by the time that the store's answer took, so those of two workers
  differ by a round trip at most.
- It is 0 while the store has not answered; the task then counts as arrived when it asks.
"""

import logging

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.stores import Store

__all__ = ["ArrivalTimes"]

logger = logging.getLogger(__name__)

EXACT_FOR = 60.0  # seconds after which the store is asked again: clocks do not run at one speed


class ArrivalTimes:
    """
    Stamps messages as they are received.

    A stamp (µs) goes with each request for a key. So a task that asks late, because it has waited
    for a slot of the pool, stands before those that were received after it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ahead: int | None = None  # µs by which the store's clock is ahead of the local one
        self._last = 0
        self._read_at = 0.0

    @property
    def inexact(self) -> bool:
        """Whether the store's clock was never read, or long ago."""
        return self._ahead is None or clock.monotonic() > self._read_at + EXACT_FOR

    def stamp(self) -> int:
        """Return the time by the store's clock, or more; 0 if it is not known."""
        if self._ahead is None:
            return 0
        self._last = max(self._last + 1, _microseconds() + self._ahead)
        return self._last

    def read_clock(self, patience: float) -> None:
        """Ask for the store's time, for *patience* seconds; what is known outlives its silence."""
        self._read_at = clock.monotonic()
        try:
            now = self._store.time(patience)
        except StoreError as error:
            logger.debug(
                "the lock store's clock was not read; arrival times go by the last reading: %s",
                error,
            )
            return
        if now:
            self._ahead = now - _microseconds()


def _microseconds() -> int:
    return round(clock.monotonic() * 1e6)
