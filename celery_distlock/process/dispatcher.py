"""
Sends the tasks that a release has woken, in a thread: the caller waits for a moment at most.

A task releases its lock within its time limit and before its result is stored, web code within a
request, and the cleanup after a dead process before it turns to the next one. None of them may
block for as long as a hanging broker keeps a socket busy. A sweep sends what is not sent in time.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .background import Background
from .forks import ForkStage, PerProcess

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # longest wait of a caller that releases, in seconds
_NOT_SENT = "a task woken by a release was not sent; the next sweep sends it"
UNSENT = 2.0  # seconds after which a sweep sends a woken task again
MOST = 300  # queued calls while the broker hangs, each with a message; a sweep sends the others


class Outcome(enum.Enum):
    """The outcome of :func:`dispatch`."""

    DONE = "done"
    PENDING = "will be done later, or is left to a sweep"
    REFUSED = "is not done: the queue is full"


@dataclass(slots=True)
class _Entry:
    send: Callable[[], object]
    work: Callable[["_Entry"], None]
    done: Any = field(init=False)
    came_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # A plain lock is implemented in C, like the queue: a time limit's exception in the waiting
        # thread cannot leave it in a state that would hang the sending thread.
        self.done = threading.Lock()
        self.done.acquire()

    def __call__(self) -> None:
        self.work(self)

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.came_at + UNSENT


class _Dispatcher:
    def __init__(self) -> None:
        self._background = Background("distlock-send-woken", _NOT_SENT)
        self._mutex = threading.Lock()
        self._hangs = False

    @property
    def hangs(self) -> bool:
        """Whether a caller gave up waiting for the broker, which has not answered since."""
        return self._hangs

    @property
    def waiting(self) -> int:
        """The number of calls queued behind the one in progress."""
        return self._background.waiting

    def dispatch(self, send: Callable[[], object], patience: float | None) -> Outcome:
        hangs, entry = self._hangs, _Entry(send, self._work)
        if hangs:
            # Drop late calls, which a sweep sends instead, so that their messages are not kept.
            self._background.discard(lambda each: isinstance(each, _Entry) and each.is_late)
            if self.waiting >= MOST:
                return Outcome.REFUSED
        try:
            self._background.submit(entry)
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            send()
            return Outcome.DONE
        if patience is None:
            patience = 0.0 if hangs else PATIENCE  # one caller has waited already
        if entry.done.acquire(timeout=patience):
            return Outcome.DONE
        with self._mutex:
            if entry.done.acquire(blocking=False):
                return Outcome.DONE
            self._hangs = True  # until the thread completes this call
        return Outcome.PENDING

    def _work(self, entry: _Entry) -> None:
        try:
            if not entry.is_late:
                entry.send()
        except BaseException:  # the caller must be released all the same
            logger.exception(_NOT_SENT)
        with self._mutex:
            self._hangs = False
            entry.done.release()


def dispatch(send: Callable[[], object], *, patience: float | None = None) -> Outcome:
    """
    Call *send* in a thread and wait for it, for a moment at most. What it raises is logged.

    A call that is still queued when a sweep sends its task instead is dropped. While the broker
    hangs, at most `MOST` calls are queued.

    Args:
        send: What to call.
        patience: Seconds to wait. None: `PATIENCE`, or 0 while the broker hangs.
    """
    return _dispatcher.value.dispatch(send, patience)


_dispatcher = PerProcess(_Dispatcher, ForkStage.THREADS)
