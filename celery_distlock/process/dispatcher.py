"""
Sends what a release has woken, in a thread: who releases gives the broker a moment, and goes on.

A task's release is within its time limit and before its result is stored, web code's is within a
request, and that of a dead process's keys is before the next one's: none of them is to wait for
as long as a broker that hangs keeps a socket busy. What is not sent in time, a sweep finds.
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

__all__ = ["PATIENCE", "UNSENT", "Outcome", "dispatch"]

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # seconds that who releases waits at most
_NOT_SENT = "what a release has woken was not sent; the next sweep sends it"
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
    work: Callable[["_Entry"], None]
    done: Any = field(init=False)
    came_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # A plain lock is C code, as the queue is: an exception that a time limit raises in the
        # thread that waits cannot leave it in a state that would hang the one that sends.
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
        """Whether the broker has kept somebody waiting in vain and has not answered since."""
        return self._hangs

    @property
    def waiting(self) -> int:
        """How many calls wait behind the one that is being sent."""
        return self._background.waiting

    def dispatch(self, send: Callable[[], object], patience: float | None) -> Outcome:
        hangs, entry = self._hangs, _Entry(send, self._work)
        if hangs:
            # What a sweep sends by now is left out, so that its messages are not kept.
            self._background.discard(lambda each: isinstance(each, _Entry) and each.is_late)
            if self.waiting >= MOST:
                return Outcome.REFUSED
        try:
            self._background.submit(entry)
        except RuntimeError:  # the interpreter ends, and starts no more threads
            send()
            return Outcome.DONE
        if patience is None:
            patience = 0.0 if hangs else PATIENCE  # one wait is enough
        if entry.done.acquire(timeout=patience):
            return Outcome.DONE
        with self._mutex:
            if entry.done.acquire(blocking=False):
                return Outcome.DONE
            self._hangs = True  # until it goes on
        return Outcome.PENDING

    def _work(self, entry: _Entry) -> None:
        try:
            if not entry.is_late:
                entry.send()
        except BaseException:  # whatever it is, who waits is to know that it is over
            logger.exception(_NOT_SENT)
        with self._mutex:
            self._hangs = False
            entry.done.release()


def dispatch(send: Callable[[], object], *, patience: float | None = None) -> Outcome:
    """
    Call *send*; return when it is done, but after a moment at the latest. What it raises is logged.

    If it waits behind others until a sweep has taken its part, it is not called; while a broker
    hangs, no more than some hundred wait.

    Args:
        send: What to call.
        patience: Seconds to wait instead, whatever is known of the broker.
    """
    return _dispatcher.value.dispatch(send, patience)


_dispatcher = PerProcess(_Dispatcher, ForkStage.THREADS)
