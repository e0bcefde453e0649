"""
Threads that work for the event loop of a worker's main process, and calls back into the loop.

The rule: *the worker's main process never waits for another machine*. While it waits, no ping is
answered, no broker heartbeat is sent and no task begins; and such a wait may last until a socket's
timeout, or for ever. Therefore:

- Nothing in the loop sends a request to a result backend, a broker or a lock store, runs users'
  code, or takes time that grows with a message's body.
- A `BoundedCaller` does that in a thread. The loop waits for it for 0.25 s at most.
- Work that takes longer returns to the loop through `LoopCalls`.
"""

import collections
import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from celery_distlock import clock
from celery_distlock.process.background import Background

__all__ = ["PATIENCE", "BoundedCaller", "LoopCalls"]

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # seconds that the event loop waits at most

T = TypeVar("T")
Call = Callable[[], object]


class LoopCalls:
    """
    Run calls from any thread in the event loop, in the order of `put`.

    Args:
        hub: The worker's event loop; None where there is none (threads, solo, gevent).
        otherwise: Schedules a call where there is no event loop; it need not keep the order.
    """

    def __init__(self, hub: Any, otherwise: Callable[[Call], object]) -> None:
        self._hub = hub
        self._otherwise = otherwise
        self._calls: collections.deque[Call] = collections.deque()
        self._mutex = threading.Lock()  # no write to a descriptor that another thread closes
        self._closed = False
        self._ends: tuple[int, int] | None = None
        if hub is not None:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
            hub.add_reader(self._ends[0], self._drain)

    def put(self, call: Call) -> None:
        """Schedule *call*; ignored after `close`."""
        with self._mutex:
            if self._closed:
                return
            self._calls.append(call)
            if self._ends is not None:
                with contextlib.suppress(BlockingIOError):  # full: the loop will read it anyway
                    os.write(self._ends[1], b"!")
                return
        self._otherwise(self._drain)  # Celery 5.5 runs the latest call first

    def close(self) -> None:
        """Drop all pending calls, and accept none from now on. Idempotent."""
        with self._mutex:
            self._closed = True
            self._calls.clear()
            ends, self._ends = self._ends, None
        if ends is not None:
            self._hub.remove(ends[0])
            for end in ends:
                os.close(end)

    def _drain(self) -> None:
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 4096)
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:  # without an event loop, several threads may drain
                return
            try:
                call()
            except Exception:
                logger.exception(
                    "unexpected error in a call of the worker's event loop; it continues"
                )


class BoundedCaller:
    """
    Run work that may take longer than the event loop may wait, one item at a time, in a thread.

    Args:
        name: The thread's name. It starts with the first item, and ends with the process.
        patience: Seconds that the loop waits for one answer at most.
        pause: Seconds for which the loop does not wait at all after a wait that timed out.
    """

    def __init__(self, name: str, *, patience: float, pause: float = 0.0) -> None:
        self._patience = patience
        self._pause = pause
        self._no_wait_until = 0.0
        self._last: Future[Any] | None = None
        self._background = Background(name, "a call for the worker's event loop went wrong")

    def ask(self, work: Callable[[], T]) -> "Future[T]":
        """
        Submit *work*; return its future when it is done, or after `patience` seconds.

        Returns at once while earlier work is not done. Call it from the loop's thread only.
        """
        busy = self._last is not None and not self._last.done()
        asked: Future[T] = Future()
        self._last = asked
        self._background.submit(functools.partial(_resolve, asked, work))
        if not busy and clock.monotonic() >= self._no_wait_until:
            try:
                asked.exception(self._patience)
            except TimeoutError:
                self._no_wait_until = clock.monotonic() + self._pause
        return asked

    def close(self) -> None:
        """Stop the thread after the work submitted so far; does not wait for it."""
        self._background.stop()


def _resolve(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # the caller gets it by the future
        future.set_exception(error)
    else:
        future.set_result(result)
