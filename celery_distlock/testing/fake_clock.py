"""Time that passes when a test says so."""

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
    A clock that stands still until it is advanced. For locks in ``memory://``.

    What is measured with it: leases and their ends, the watchdog's renewals, how long anybody waits
    for a key, since when a key is held, the pauses of the queue. A server's clock is its own.

    *The thread that made the clock never waits for a key:* where it would, the time passes at once.
    A task that it runs eagerly while somebody else holds the key has waited for `lock_wait` seconds
    in no time. Other threads that wait, and coroutines, do so until :meth:`advance` has brought
    them there.

    What it does not do: ``time.sleep()``, ``countdown`` and time limits are real; so are the
    intervals in which a worker sweeps, but :meth:`advance` makes what is to be swept.
    """

    def __init__(self) -> None:
        self._now = math.ceil(1000 * clock.monotonic()) / 1000  # stores count milliseconds
        self._epoch = clock.wall() - self._now
        self._own_thread = threading.get_ident()
        self._waited_for: set[threading.Event] = set()
        self._really_wait = clock.wait

    @contextmanager
    def running(self) -> Iterator["FakeClock"]:
        """Be this process's clock until the end of the block."""
        with (
            mock.patch.object(clock, "monotonic", self.monotonic),
            mock.patch.object(clock, "wall", self.wall),
            mock.patch.object(clock, "wait", self.wait),
            mock.patch.object(Watchdog, "ask", _ask_at_once),
        ):
            yield self

    def monotonic(self) -> float:
        """Return seconds."""
        return self._now

    def wall(self) -> float:
        """Return seconds since the epoch."""
        return self._epoch + self._now

    def advance(self, seconds: float) -> None:
        """
        Let *seconds* pass: leases end, but for those that a watchdog renews all along.

        Threads that wait for a key look again, a moment after this has returned. Inside a task
        whose lease ends, the task is aborted, as in a worker.

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
        """Wait for *event*; see the class."""
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
    """Without a thread beside it, for which this clock would not wait."""
    request.make()
    return request.wait()


def _next_renewal() -> float:
    """Return when the first of all watchdogs has something to do."""
    times = [due for each in _watchdogs() for due in each._due.copy().values()]
    return min(times, default=math.inf)
