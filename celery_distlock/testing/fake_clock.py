"""A clock that a test advances."""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from celery_distlock import clock
from celery_distlock.engine import watchdog
from celery_distlock.engine.watchdog import Outcome, Request, Watchdog

__all__ = ["FakeClock"]


class FakeClock:
    """
    A clock that only moves when it is advanced, for locks in ``memory://``.

    It measures leases, the watchdog's renewals, waits for keys, the age of holds, and the pauses of
    the queue. It does not affect the clock of a server.

    *The thread that created the clock never waits for a key:* where it would wait, the time passes
    at once. For example, a task that runs eagerly in it waits `lock_wait` seconds for a key that
    another holder has, and no real time passes. Other threads and coroutines wait until
    :meth:`advance` reaches the end of their waits.

    ``time.sleep()``, ``countdown`` and time limits take real time. So do the intervals between a
    worker's sweeps, though :meth:`advance` can end the leases that a sweep looks for.
    """

    def __init__(self) -> None:
        self._now = math.ceil(1000 * clock.monotonic()) / 1000  # stores count milliseconds
        self._epoch = clock.wall() - self._now
        self._own_thread = threading.get_ident()
        self._waited_for: set[threading.Event] = set()
        self._really_wait = clock.wait

    @contextmanager
    def running(self) -> Iterator["FakeClock"]:
        """Make this the clock of the process until the end of the block."""
        with (
            mock.patch.object(clock, "monotonic", self.monotonic),
            mock.patch.object(clock, "wall", self.wall),
            mock.patch.object(clock, "wait", self.wait),
            mock.patch.object(Watchdog, "ask", _ask_at_once),
        ):
            yield self

    def monotonic(self) -> float:
        """Return the time in seconds, like ``time.monotonic()``."""
        return self._now

    def wall(self) -> float:
        """Return the time in seconds since the epoch."""
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        """
        Let *seconds* pass: leases end, except those that a watchdog renews in time.

        Threads that wait for a key look again shortly after this returns. Called inside a task
        whose lease ends, this aborts the task, as in a worker.

        Raises:
            ValueError: *seconds* is negative.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds!r} seconds")
        until = self._now + seconds
        while (due := _next_renewal()) <= until:
            self._now = max(self._now, due)
            for each in _watchdogs():
                each._pass()
        self._now = until
        for event in self._waited_for.copy():
            event.set()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Wait for *event*, for *timeout* seconds on this clock; see the class."""
        if threading.get_ident() == self._own_thread:
            if not event.is_set():
                self.advance(timeout)
            return event.is_set()
        self._waited_for.add(event)
        try:
            return self._really_wait(event, timeout)
        finally:
            self._waited_for.discard(event)


def _watchdogs() -> list[Watchdog]:
    return list(watchdog._watchdogs.values())


def _ask_at_once(_: Watchdog, request: Request) -> list[Outcome]:
    """Renew in the calling thread: this clock would not wait for another thread."""
    request.make()
    return request.wait()


def _next_renewal() -> float:
    """Return the time of the next renewal of any watchdog."""
    times = [due for each in _watchdogs() for due in each._due.copy().values()]
    return min(times, default=math.inf)
