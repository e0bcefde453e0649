"""Background threads: each has one queue, so that callers need not wait for slow work."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakSet

from .forks import ExitStage, ForkStage, at_exit, at_fork
from .log_lines import log_safely
from .threads import DaemonThread

logger = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between rounds
MOST = 10_000  # queued notifications; further ones are dropped until the thread catches up
LAST_MOMENT = 1.0  # seconds that the process waits for each notifier when it exits

Call = Callable[[], object]
_Calls = queue.SimpleQueue[Call | None]


class Background:
    """
    A daemon thread that executes submitted calls one at a time and survives their exceptions.

    The thread starts at the first call. A forked child starts with an empty queue and starts its
    own thread at its first call; the parent executes the calls that were submitted in the parent.
    All methods may be called from any thread.

    Args:
        name: The thread's name.
        failed: The message to log when a call raises.
        limit: The most calls that may be queued; further ones are dropped. None: no limit.

    Attributes:
        calls: The queue; None: the thread has not started.
    """

    def __init__(self, name: str, failed: str, *, limit: int | None = None) -> None:
        self._name = name
        self._failed = failed
        self._limit = limit
        self.calls: _Calls | None = None
        self._mutexes: dict[None, AbstractContextManager[bool]] = {}
        _backgrounds.add(self)

    def submit(self, call: Call) -> bool:
        """
        Queue *call*; return False if it was dropped because the queue is full.

        Raises:
            RuntimeError: The interpreter is shutting down and cannot start a thread.
        """
        calls = self.calls or self._start()
        if self._limit is not None and calls.qsize() >= self._limit:
            return False
        calls.put(call)
        return True

    def start(self) -> None:
        """Start the thread unless it is running."""
        if self.calls is None:
            self._start()

    @property
    def waiting(self) -> int:
        """The number of queued calls, without the one in progress."""
        return self.calls.qsize() if self.calls is not None else 0

    def discard(self, unwanted: Callable[[Call], bool]) -> None:
        """Drop the queued calls that are *unwanted*; the order of the others may change."""
        calls = self.calls
        for _ in range(self.waiting):
            try:
                call = calls.get_nowait()  # type: ignore[union-attr]  # None: no calls
            except queue.Empty:
                return
            if call is None or not unwanted(call):
                calls.put(call)  # type: ignore[union-attr]

    def stop(self) -> None:
        """End the thread after the calls submitted so far, without waiting for it."""
        if self.calls is not None:
            self.calls.put(None)

    def finish(self, timeout: float) -> None:
        """Wait up to *timeout* seconds for the calls submitted so far, and end the thread."""
        if self.calls is not None:
            self.calls.put(None)
            self._thread.join(timeout)

    def catch_up(self, timeout: float) -> None:
        """Wait up to *timeout* seconds for the calls submitted so far."""
        if self.calls is not None and self._thread.is_alive():
            done = threading.Event()
            self.calls.put(done.set)
            done.wait(timeout)

    def reset(self) -> None:
        """Forget the thread and its queue, in a forked child."""
        self.calls = None
        self._mutexes = {}

    def _start(self) -> _Calls:
        # Created only now, because gevent may patch queues, threads and mutexes after the import
        # of this module. The mutex makes the greenlets wait that gevent runs while the thread
        # starts. It is reentrant because a signal handler may interrupt this thread here and
        # acquire a lock, and must not deadlock with its own thread.
        with self._mutexes.setdefault(None, threading.RLock()):
            if self.calls is None:
                # A SimpleQueue is implemented in C: a time limit's exception in a submitting thread
                # cannot leave it locked.
                calls: _Calls = queue.SimpleQueue()
                thread = DaemonThread(self._name, self._run, calls)
                thread.start()
                if self.calls is None:
                    self._thread, self.calls = thread, calls
                else:  # such a signal handler has started another thread
                    calls.put(None)
            return self.calls

    def _run(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            self._do(call)
            del call  # else it would be referenced until the next one

    def _do(self, call: Call) -> None:
        try:
            call()
        except BaseException:  # noqa: BLE001  # the thread must survive
            log_safely(logger, logging.ERROR, self._failed, exc_info=True)


class BackgroundNotifier(Background):
    """
    Emits notifications about locks in the background, and those left when the process exits.

    Args:
        name: The thread's name. It starts at the first notification.
        every_round: Called every two seconds from then on and when the process exits, never
            concurrently.
    """

    def __init__(self, name: str, every_round: Call | None = None) -> None:
        super().__init__(name, "could not deliver a lock notification", limit=MOST)
        self._every_round = every_round
        self._rounds = threading.Lock()
        _notifiers.add(self)

    def go_round(self) -> None:
        """Run `every_round` now in this thread, after one in progress."""
        with self._rounds:
            if self._every_round is not None:
                self._do(self._every_round)

    def reset(self) -> None:
        super().reset()
        self._rounds = threading.Lock()

    def _run(self, calls: _Calls) -> None:
        if self._every_round is None:
            super()._run(calls)
            return
        next_round = time.monotonic() + INTERVAL
        ending = False
        while not ending:
            try:
                call = calls.get(timeout=max(0.0, next_round - time.monotonic()))
            except queue.Empty:
                call = None
            else:
                ending = call is None
            if call is not None:
                self._do(call)
            del call
            if ending or time.monotonic() >= next_round:
                self.go_round()
                next_round = time.monotonic() + INTERVAL


_backgrounds: WeakSet[Background] = WeakSet()
_notifiers: WeakSet[BackgroundNotifier] = WeakSet()


def _reset_all() -> None:
    for each in list(_backgrounds):
        each.reset()


def finish_all(**_: object) -> None:
    """Flush all notifiers when the process exits, up to `LAST_MOMENT` seconds each."""
    for each in list(_notifiers):
        each.finish(LAST_MOMENT)


at_fork(_reset_all, ForkStage.THREADS)
at_exit(finish_all, ExitStage.NOTIFICATIONS)
