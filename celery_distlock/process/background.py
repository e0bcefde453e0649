"""Threads that do in the background what nobody is to wait for: one queue and one thread each."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakSet

from .forks import ExitStage, ForkStage, at_exit, begin_anew
from .log_lines import say

__all__ = ["LAST_MOMENT", "Background", "BackgroundNotifier", "finish_all"]

logger = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between rounds
MOST = 10_000  # notifications that wait; while nobody takes them, further ones are dropped
LAST_MOMENT = 1.0  # seconds that the end of the process waits for each notifier

Call = Callable[[], object]
_Calls = queue.SimpleQueue[Call | None]


class Background:
    """
    A named daemon thread that does calls one after the other, and survives what they raise.

    It starts with the first call, and again with the first one in a forked child, where nothing
    waits: the parent does what was submitted there. All methods may be called from any thread.

    Args:
        name: The thread's.
        failed: What the log says when a call raises.
        limit: Calls that wait at most; further ones are dropped. None: any number.
    """

    def __init__(self, name: str, failed: str, *, limit: int | None = None) -> None:
        self._name = name
        self._failed = failed
        self._limit = limit
        self._calls: _Calls | None = None
        self._mutexes: dict[None, AbstractContextManager[bool]] = {}
        _backgrounds.add(self)

    def submit(self, call: Call) -> bool:
        """
        Have *call* done soon; return False if it was dropped because too many wait.

        Raises:
            RuntimeError: The interpreter ends, and starts no more threads.
        """
        calls = self._calls or self._start()
        if self._limit is not None and calls.qsize() >= self._limit:
            return False
        calls.put(call)
        return True

    def start(self) -> None:
        """See that the thread runs."""
        if self._calls is None:
            self._start()

    @property
    def waiting(self) -> int:
        """How many calls wait, without the one that is being done."""
        return self._calls.qsize() if self._calls is not None else 0

    def discard(self, unwanted: Callable[[Call], bool]) -> None:
        """Drop the *unwanted* of the calls that wait; the others may change their order."""
        calls = self._calls
        for _ in range(self.waiting):
            try:
                call = calls.get_nowait()  # type: ignore[union-attr]  # or none waited
            except queue.Empty:
                return
            if call is None or not unwanted(call):
                calls.put(call)  # type: ignore[union-attr]

    def stop(self) -> None:
        """End the thread after what was submitted until now; does not wait for it."""
        if self._calls is not None:
            self._calls.put(None)

    def finish(self, timeout: float) -> None:
        """Do what was submitted until now, for *timeout* seconds at most, and end the thread."""
        if self._calls is not None:
            self._calls.put(None)
            self._thread.join(timeout)

    def catch_up(self, timeout: float) -> None:
        """Wait until what was submitted until now is done, for *timeout* seconds at most."""
        if self._calls is not None and self._thread.is_alive():
            done = threading.Event()
            self._calls.put(done.set)
            done.wait(timeout)

    def begin_anew(self) -> None:
        """Forget the thread and what waits for it, in a forked child."""
        self._calls = None
        self._mutexes = {}

    def _start(self) -> _Calls:
        # None of it before: whoever imports us may have gevent put its own queues, threads and
        # mutexes in. While a thread starts, gevent goes on with others, who wait here; and a
        # signal's handler may come, who takes a lock and must not wait for its own thread.
        with self._mutexes.setdefault(None, threading.RLock()):
            if self._calls is None:
                # A simple queue is C code: an exception that a time limit raises in a thread that
                # submits cannot leave it locked.
                calls: _Calls = queue.SimpleQueue()
                thread = threading.Thread(
                    target=self._run, args=(calls,), name=self._name, daemon=True
                )
                thread.start()
                if self._calls is None:
                    self._thread, self._calls = thread, calls
                else:  # such a handler has started another
                    calls.put(None)
            return self._calls

    def _run(self, calls: _Calls) -> None:
        while (call := calls.get()) is not None:
            self._do(call)
            del call  # or it would be kept until the next one comes

    def _do(self, call: Call) -> None:
        try:
            call()
        except BaseException:  # noqa: BLE001  # whatever it is, the next one is to be done
            say(logger, logging.ERROR, self._failed, exc_info=True)


class BackgroundNotifier(Background):
    """
    Tells others what happened to locks, and is given a last moment at the end of the process.

    Args:
        name: The thread's, which starts when there is something to tell.
        every_round: Called every two seconds from then on, and at the process's end; never twice at
            a time.
    """

    def __init__(self, name: str, every_round: Call | None = None) -> None:
        super().__init__(name, "could not deliver a lock notification", limit=MOST)
        self._every_round = every_round
        self._rounds = threading.Lock()
        _notifiers.add(self)

    def go_round(self) -> None:
        """Do a round now, in this thread, after one that is under way."""
        with self._rounds:
            if self._every_round is not None:
                self._do(self._every_round)

    def begin_anew(self) -> None:
        super().begin_anew()
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


def _begin_anew() -> None:
    for each in list(_backgrounds):
        each.begin_anew()


def finish_all(**_: object) -> None:
    """Have all notifiers tell what is left, for a moment each; called where a process ends."""
    for each in list(_notifiers):
        each.finish(LAST_MOMENT)


begin_anew(_begin_anew, ForkStage.THREADS)
at_exit(finish_all, ExitStage.NOTIFICATIONS)
