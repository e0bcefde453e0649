"""
Threads that work for the event loop of a worker's main process, and calls back into it.

The rule: *the worker's main process waits for nothing but its own*. While it waits, no ping is
answered, no broker heartbeat is sent and no task begins; and another machine may keep it waiting
for as long as a socket's timeout, or for ever. So

- nothing in the loop asks a result backend, a broker or a lock store, runs users' code, or takes
  time that grows with a message's body;
- a `BoundedCaller` does that in a thread, for which the loop waits 0.25 s at the very most;
- what takes longer comes back to the loop through `LoopCalls`.
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
    Calls that any thread hands to the event loop, which does them in the order that they came in.

    Args:
        hub: The worker's event loop; None where there is none (threads, solo, gevent).
        otherwise: Has a call done where there is no event loop, in whatever order.
    """

    def __init__(self, hub: Any, otherwise: Callable[[Call], object]) -> None:
        self._hub = hub
        self._otherwise = otherwise
        self._calls: collections.deque[Call] = collections.deque()
        self._mutex = threading.Lock()  # nobody may write to a descriptor that is closed meanwhile
        self._closed = False
        self._ends: tuple[int, int] | None = None
        if hub is not None:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
            hub.add_reader(self._ends[0], self._drain)

    def put(self, call: Call) -> None:
        """Have *call* done soon; never, if this is closed."""
        with self._mutex:
            if self._closed:
                return
            self._calls.append(call)
            if self._ends is not None:
                with contextlib.suppress(BlockingIOError):  # full: the loop is about to look anyway
                    os.write(self._ends[1], b"!")
                return
        self._otherwise(self._drain)  # Celery 5.5 does first what came last

    def close(self) -> None:
        """Forget what was not called yet, and take no more. Idempotent."""
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
            except IndexError:  # where there is no event loop, others may be here, too
                return
            try:
                call()
            except Exception:
                logger.exception(
                    "unexpected error in a call of the worker's event loop; it goes on"
                )


class BoundedCaller:
    """
    A thread that does, one after the other, what may take longer than the event loop may wait.

    Args:
        name: The thread's, which begins when there is something to do, and ends with the process.
        patience: Seconds that the loop waits for one answer at most.
        pause: Seconds for which the loop does not wait at all after it has waited in vain.
    """

    def __init__(self, name: str, *, patience: float, pause: float = 0.0) -> None:
        self._patience = patience
        self._pause = pause
        self._no_wait_until = 0.0
        self._last: Future[Any] | None = None
        self._background = Background(name, "a call for the worker's event loop went wrong")

    def ask(self, work: Callable[[], T]) -> "Future[T]":
        """
        Have *work* done; return when it is, but after a moment at the latest.

        Does not wait at all behind what is not done yet. For one thread, the loop's.
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
        """End, after what was asked for until now; does not wait for it."""
        self._background.stop()


def _resolve(future: Future[T], work: Callable[[], T]) -> None:
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001  # it is whoever asked that is to know
        future.set_exception(error)
    else:
        future.set_result(result)
