"""A thread that tells others what has happened, so that no task waits for them."""

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable

from celery.signals import worker_process_shutdown

__all__ = ["Teller", "teller"]

logger = logging.getLogger(__name__)

INTERVAL = 2.0  # seconds between the rounds of those who gather what they have to tell
MOST = 10_000  # things to tell at once; while nobody listens, what comes then is left out
LAST_MOMENT = 1.0  # seconds that the end of the process waits for what is still to be told


class Teller:
    """See the module. One for each process, from :func:`teller`; begins with the first thing."""

    def __init__(self) -> None:
        # C code, that a time limit's exception cannot leave locked.
        self._said: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._rounds: set[Callable[[], object]] = set()
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None
        self._failing = False

    def tell(self, say: Callable[[], object]) -> None:
        """Call *say* soon, in the thread; what it raises is logged."""
        if self._said.qsize() < MOST:
            self._said.put(say)
        self._start()

    def go_round(self, say: Callable[[], object]) -> None:
        """Call *say* every two seconds from now on, and at the process's end."""
        if say not in self._rounds:
            self._rounds.add(say)
            self.tell(_nothing)

    def finish(self) -> None:
        """Tell what is left, but for a moment only; for the end of the process."""
        if self._thread is not None:
            self._failing = True  # at the end it is no news that others are gone, too
            self._said.put(None)
            self._thread.join(LAST_MOMENT)

    def _start(self) -> None:
        if self._thread is not None:
            return
        with self._mutex:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="distlock-teller", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        next_round = time.monotonic() + INTERVAL
        ending = False
        while not ending:
            pause = max(0.0, next_round - time.monotonic()) if self._rounds else None
            with contextlib.suppress(queue.Empty):
                say = self._said.get(timeout=pause)
                ending = say is None
                self._say(say or _nothing)
            if ending or time.monotonic() >= next_round:
                for each in list(self._rounds):
                    self._say(each)
                next_round = time.monotonic() + INTERVAL

    def _say(self, say: Callable[[], object]) -> None:
        try:
            say()
        except Exception as error:  # noqa: BLE001  # whatever others do, the next one is told
            report = logger.debug if self._failing else logger.info
            report("what happened to locks cannot be told now: %s", error)
            self._failing = True
        else:
            self._failing = False


def _nothing() -> None:
    pass


def teller() -> Teller:
    """Return this process's teller."""
    return _teller


def _after_fork() -> None:
    global _teller  # noqa: PLW0603  # the parent's thread does not run in a forked child
    _teller = Teller()


_teller = Teller()
os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _finish(**_: object) -> None:
    _teller.finish()


worker_process_shutdown.connect(_finish)
