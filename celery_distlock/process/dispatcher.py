"""
Sends what a release has woken, in a thread: who releases gives the broker a moment, and goes on.

A task's release is within its time limit and before its result is stored, web code's is within a
request, and that of a dead process's keys is before the next one's: none of them is to wait for
as long as a broker that hangs keeps a socket busy. What is not sent in time, a sweep finds.
"""

import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PATIENCE", "UNSENT", "Outcome", "dispatch"]

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # seconds that who releases waits at most
UNSENT = 2.0  # seconds after which a sweep sends it
MOST = 300  # calls that wait while the broker hangs, each with a message; a sweep finds the others


class Outcome(enum.Enum):
    """What became of a call."""

    DONE = "done"
    PENDING = "is done later, or left to a sweep"
    REFUSED = "is not done: too many wait"


@dataclass(slots=True)
class _Entry:
    send: Callable[[], object]
    done: Any = field(init=False)
    came_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.done = threading.Lock()
        self.done.acquire()

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.came_at + UNSENT


class _Dispatcher:
    def __init__(self) -> None:
        # A simple queue and plain locks are C code, which a time limit's exception that strikes
        # who waits cannot leave in a state that would hang this thread.
        self._waiting: queue.SimpleQueue[_Entry] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._hangs = False

    def dispatch(self, send: Callable[[], object], patience: float | None) -> Outcome:
        hangs, entry = self._hangs, _Entry(send)
        if hangs:
            self._drop_late()
            if self._waiting.qsize() >= MOST:
                return Outcome.REFUSED
        try:
            self._begin()
        except RuntimeError:  # the interpreter ends, and begins no more threads
            send()
            return Outcome.DONE
        self._waiting.put(entry)
        if patience is None:
            patience = 0.0 if hangs else PATIENCE  # one wait is enough
        if entry.done.acquire(timeout=patience):
            return Outcome.DONE
        with self._mutex:
            if entry.done.acquire(blocking=False):
                return Outcome.DONE
            self._hangs = True  # until it goes on
        return Outcome.PENDING

    def _begin(self) -> None:
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="distlock-dispatch", daemon=True)
                thread.start()
                self._thread = thread

    def _drop_late(self) -> None:
        """Leave out what a sweep sends by now, so that its messages are not kept."""
        for _ in range(self._waiting.qsize()):
            try:
                entry = self._waiting.get_nowait()
            except queue.Empty:
                return
            if not entry.is_late:
                self._waiting.put(entry)

    def _run(self) -> None:
        while True:
            entry = self._waiting.get()
            try:
                if not entry.is_late:
                    entry.send()
            except BaseException:  # whatever it is, the next one is to be sent
                logger.exception("what a release has woken was not sent; the next sweep sends it")
            with self._mutex:
                self._hangs = False
                entry.done.release()
            del entry  # or it would be kept until the next one comes


def dispatch(send: Callable[[], object], *, patience: float | None = None) -> Outcome:
    """
    Call *send*; return when it is done, but after a moment at the latest. What it raises is logged.

    If it waits behind others until a sweep has taken its part, it is not called; while a broker
    hangs, no more than some hundred wait.

    Args:
        send: What to call.
        patience: Seconds to wait instead, whatever is known of the broker.
    """
    # Not before: whoever imports us may have gevent put its own queues, locks and threads in.
    dispatcher = _dispatchers.get("it") or _dispatchers.setdefault("it", _Dispatcher())
    return dispatcher.dispatch(send, patience)


def _after_fork() -> None:
    _dispatchers.clear()  # the parent's thread does not run in a forked child


_dispatchers: dict[str, _Dispatcher] = {}
os.register_at_fork(after_in_child=_after_fork)
