"""A thread that tells others what has happened, so that no task waits for them."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

__all__ = ["BackgroundNotifier", "finish_all"]

logger = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between rounds
MOST = 10_000  # things to tell; while nobody listens, what comes then is left out
LAST_MOMENT = 1.0  # seconds that the end of the process waits for what is still to be told


class BackgroundNotifier:
    """
    See the module; lasts as long as the process, and goes on in a forked child with nothing to say.

    Args:
        name: The thread's, which begins when there is something to tell.
        every_round: Called every two seconds from then on, and at the process's end; never twice at
            a time.
    """

    def __init__(self, name: str, every_round: Callable[[], object] | None = None) -> None:
        self._name = name
        self._every_round = every_round
        self._said: queue.SimpleQueue[Callable[[], object] | None] | None = None
        self._mutex = threading.Lock()
        self._rounds = threading.Lock()
        _notifiers.append(self)

    def tell(self, say: Callable[[], object]) -> None:
        """Call *say* soon, in the thread; what it raises is logged."""
        said = self._said or self._begin()
        if said.qsize() < MOST:
            said.put(say)

    def begin(self) -> None:
        """See that the thread runs."""
        if self._said is None:
            self._begin()

    def _begin(self) -> "queue.SimpleQueue[Callable[[], object] | None]":
        with self._mutex:
            if self._said is None:
                # Not before: whoever imports us may have gevent put its own queues and threads in.
                # A simple one is C code, that a time limit's exception cannot leave locked.
                said: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(said,), name=self._name, daemon=True
                )
                self._thread.start()
                self._said = said
            return self._said

    def go_round(self) -> None:
        """Do a round now, in this thread, after one that is under way."""
        with self._rounds:
            _call(self._every_round)

    def finish(self) -> None:
        """Tell what is left, but for a moment only; for the end of the process."""
        if self._said is not None:
            self._said.put(None)
            self._thread.join(LAST_MOMENT)

    def forget(self) -> None:
        """Begin anew, in a forked child: the parent's thread does not run there."""
        self._said = None
        self._mutex = threading.Lock()
        self._rounds = threading.Lock()

    def _run(self, said: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
        next_round = time.monotonic() + INTERVAL
        ending = False
        while not ending:
            pause = max(0.0, next_round - time.monotonic()) if self._every_round else None
            with contextlib.suppress(queue.Empty):
                say = said.get(timeout=pause)
                ending = say is None
                _call(say)
            if ending or time.monotonic() >= next_round:
                self.go_round()
                next_round = time.monotonic() + INTERVAL


def _call(say: Callable[[], object] | None) -> None:
    if say is not None:
        try:
            say()
        except Exception:
            logger.exception("something that happened to locks was not told")


_notifiers: list[BackgroundNotifier] = []


def _after_fork() -> None:
    for each in _notifiers:
        each.forget()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def finish_all(**_: object) -> None:
    """Have all of them tell what is left; for the end of the process, told by whoever ends it."""
    for each in _notifiers:
        each.finish()
