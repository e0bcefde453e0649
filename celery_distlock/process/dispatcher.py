"""
Sends the tasks that a release has woken, in a thread: the caller waits for a moment at most.

A task releases its lock within its time limit and before its result is stored, web code within a
request, and the cleanup after a dead process before it turns to the next one. None of them may
block for as long as a hanging broker keeps a socket busy. A sweep sends what is not sent in time.

Calls of one subject, such as a key, are made in their order. Those of several subjects wait for the
same distant server at the same time, each in a thread; one thread does where it is near.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from .background import Background
from .forks import ForkStage, PerProcess

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # longest wait of a caller that releases, in seconds
_NOT_SENT = "a task woken by a release was not sent; the next sweep sends it"
UNSENT = 2.0  # seconds after which a sweep sends a woken task again
THREADS = 8
MOST = 300  # queued calls while the broker hangs, each with a message; a sweep sends the others


class Outcome(enum.Enum):
    """The outcome of :func:`dispatch`."""

    DONE = "done"
    PENDING = "will be done later, or is left to a sweep"
    REFUSED = "is not done: the queue is full"


@dataclass(slots=True)
class _Entry:
    send: Callable[[], object]
    subject: str
    thread: "_Thread"
    done: Any = field(init=False)
    came_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        # A plain lock is implemented in C, like the queue: a time limit's exception in the waiting
        # thread cannot leave it in a state that would hang the sending thread.
        self.done = threading.Lock()
        self.done.acquire()

    def __call__(self) -> None:
        self.thread.work(self)

    @property
    def is_late(self) -> bool:
        return time.monotonic() >= self.came_at + UNSENT


class _Thread:
    """A thread of the dispatcher, and the subjects of its calls, without an order."""

    def __init__(self, note_end: Callable[[_Entry], None]) -> None:
        self.background = Background("distlock-send-woken", _NOT_SENT)
        self.subjects: list[str] = []  # not a set: its methods are atomic, and so count
        self._note_end = note_end

    def submit(self, entry: _Entry) -> None:
        self.subjects.append(entry.subject)
        try:
            self.background.submit(entry)
        except RuntimeError:
            self.subjects.remove(entry.subject)
            raise

    def discard_late(self) -> None:
        """Drop late calls, which a sweep sends instead, so that their messages are not kept."""
        self.background.discard(self._drops)

    def _drops(self, call: Any) -> bool:
        drops = isinstance(call, _Entry) and call.is_late
        if drops:
            self.subjects.remove(call.subject)
        return drops

    def work(self, entry: _Entry) -> None:
        try:
            if not entry.is_late:
                entry.send()
        except BaseException:  # the caller must be released all the same
            logger.exception(_NOT_SENT)
        self.subjects.remove(entry.subject)
        self._note_end(entry)


class _Dispatcher:
    def __init__(self) -> None:
        self._threads = [_Thread(self._note_end) for _ in range(THREADS)]
        self._mutex = threading.Lock()
        self._hangs = False

    @property
    def hangs(self) -> bool:
        """Whether a caller gave up waiting for the broker, which has not answered since."""
        return self._hangs

    @property
    def waiting(self) -> int:
        """The number of calls queued behind those in progress."""
        return sum(each.background.waiting for each in self._threads)

    def begin(self, send: Callable[[], object], subject: str) -> "_Entry | Outcome":
        if self._hangs:
            for each in self._threads:
                each.discard_late()
            if self.waiting >= MOST:
                return Outcome.REFUSED
        thread = self._thread_for(subject)
        entry = _Entry(send, subject, thread)
        try:
            thread.submit(entry)
        except RuntimeError:  # the interpreter is shutting down and starts no thread
            send()
            return Outcome.DONE
        return entry

    def _thread_for(self, subject: str) -> _Thread:
        """Return the thread that has a call of *subject*; else one without calls; else any."""
        counts = [(len(each.subjects), each) for each in self._threads]
        for count, thread in counts:
            if count and subject in thread.subjects:
                return thread
        return min(counts, key=itemgetter(0))[1]

    def wait(self, entry: _Entry, patience: float | None, hung: bool = False) -> Outcome:
        if patience is None:
            patience = 0.0 if hung else PATIENCE  # one caller has waited already
        if entry.done.acquire(timeout=patience):
            return Outcome.DONE
        with self._mutex:
            if entry.done.acquire(blocking=False):
                return Outcome.DONE
            self._hangs = True  # until a thread completes a call
        return Outcome.PENDING

    def _note_end(self, entry: _Entry) -> None:
        with self._mutex:
            self._hangs = False
            entry.done.release()


def begin(send: Callable[[], object], subject: str) -> Callable[[float | None], Outcome]:
    """
    Call *send* in a thread; return a function that waits for it. What *send* raises is logged.

    A call that is still queued when a sweep sends its task instead is dropped. While the broker
    hangs, at most `MOST` calls are queued.

    Args:
        send: What to call.
        subject: The calls of one subject are made one after the other.

    Returns:
        A function of the seconds to wait. None: `PATIENCE`, or 0 while the broker hangs.
    """
    dispatcher = _dispatcher.value
    hung, entry = dispatcher.hangs, dispatcher.begin(send, subject)

    def wait(patience: float | None) -> Outcome:
        return entry if isinstance(entry, Outcome) else dispatcher.wait(entry, patience, hung)

    return wait


_dispatcher = PerProcess(_Dispatcher, ForkStage.THREADS)
