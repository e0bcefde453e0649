"""
Threads that make blocking requests on behalf of coroutines.

They start on demand and end when idle. Unlike those of :mod:`concurrent.futures` they are daemon
threads: a server that hangs does not keep a process from exiting.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from .forks import ExitStage, ForkStage, at_exit, at_fork
from .threads import DaemonThread

logger = logging.getLogger(__name__)

MOST = 8  # threads; a request takes a fraction of a millisecond and never waits for a lock
IDLE = 5.0  # seconds without a request after which a thread ends
LAST_MOMENT = 1.0  # seconds that the process waits for unfinished requests when it exits

T = TypeVar("T")


class RequestThreads:
    """
    Threads for requests of one kind; any number of event loops may use them.

    Args:
        name: The name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._threads = 0
        self._unfinished = 0  # calls, including those in progress
        _all.add(self)

    async def call(
        self,
        function: Callable[[], T],
        *,
        undo: Callable[[], object] | None = None,
        timeout: float | None = None,
    ) -> T:
        """
        Return what *function* returns in a thread, or raise what it raises.

        Args:
            function: What to call.
            undo: Called once if the caller does not get the result: *function* raised, the caller
                was cancelled or timed out, or its loop was closed. It is called after *function*
                has ended; a function that has not started by then is not called. It must not
                block. Without *undo*, *function* is called even if the caller is gone.
            timeout: Seconds. None: wait without a limit.

        Raises:
            TimeoutError: There was no result within *timeout* seconds.
        """
        call = _Call(asyncio.get_running_loop(), function, undo)
        self._submit(call)
        try:
            return await call.result(timeout)
        except BaseException:  # cancelled, timed out, or closed with its loop: must not await here
            call.abandon()
            raise

    def _submit(self, call: "_Call[Any]") -> None:
        with self._mutex:
            self._unfinished += 1
            self._calls.put(call)
            if self._unfinished <= self._threads or self._threads >= MOST:
                return
            self._threads += 1
        try:
            DaemonThread(self._name, self._run).start()
        except RuntimeError:  # no thread can be started
            with self._mutex:
                self._threads -= 1
                alone = self._threads == 0
            if alone:
                self._do(self._calls.get())

    def _run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=IDLE)
            except queue.Empty:
                with self._mutex:
                    if self._calls.empty():
                        self._threads -= 1
                        return
                continue
            self._do(call)
            del call  # else its caller would be referenced until the next one

    def _do(self, call: "_Call[Any]") -> None:
        try:
            call.run()
        finally:
            with self._mutex:
                self._unfinished -= 1

    def finish(self, until: float) -> None:
        """Wait for the submitted calls, until the monotonic time *until* at the latest."""
        while self._unfinished and self._threads and time.monotonic() < until:
            time.sleep(0.01)


class _Call(Generic[T]):
    """One call for a coroutine, which is undone if the coroutine no longer wants its result."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], T],
        undo: Callable[[], object] | None,
    ) -> None:
        self._loop = loop
        self._future: asyncio.Future[T] = loop.create_future()
        self._function = function
        self._undo = undo
        self._mutex = threading.Lock()
        self._runs = self._abandoned = False

    async def result(self, timeout: float | None) -> T:
        """Wait for the result."""
        if timeout is None:
            return await self._future
        timer = self._loop.call_later(timeout, self._resolve, None, TimeoutError())
        try:
            return await self._future
        finally:
            timer.cancel()

    def run(self) -> None:
        """Call the function, in this thread."""
        with self._mutex:
            if self._abandoned and self._undo is not None:
                return
            self._runs = True
        result: T | None = None
        error: BaseException | None = None
        try:
            result = self._function()
        except BaseException as raised:  # noqa: BLE001  # raised in the caller
            error = raised
        with self._mutex:
            self._runs = False
            abandoned = self._abandoned
        if not abandoned:
            try:
                self._loop.call_soon_threadsafe(self._resolve, result, error)
            except RuntimeError:  # the loop is closed
                self.abandon()
        else:
            self._call_undo()
        del error  # its traceback would keep this frame and the result alive

    def abandon(self) -> None:
        """Undo the call: now, or when it has ended if it is in progress."""
        with self._mutex:
            if self._abandoned:
                return
            self._abandoned = True
            runs = self._runs
        if not runs:
            self._call_undo()

    def _resolve(self, result: Any, error: BaseException | None) -> None:
        if self._future.done():
            return
        if error is None:
            self._future.set_result(result)
        else:
            self._future.set_exception(error)

    def _call_undo(self) -> None:
        if self._undo is None:
            return
        try:
            self._undo()
        except Exception:
            logger.exception("could not undo a request whose result a coroutine did not get")


def _finish() -> None:
    until = time.monotonic() + LAST_MOMENT
    for each in list(_all):
        each.finish(until)


_all: WeakSet[RequestThreads] = WeakSet()
at_fork(_all.clear, ForkStage.THREADS)
at_exit(_finish, ExitStage.RELEASES)
