"""
Runs errbacks that are locked tasks beside the worker's main process, not in its event loop.

Celery calls an errback that takes the request, the error and its traceback in the process where it
learns of a failure. Of a pool process that has died, or is over its hard time limit, that is the
main process, which must not wait for a key.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from celery import bootsteps
from celery.app.task import Context

from celery_distlock.process.background import Background
from celery_distlock.runtime.app import Runtime

from .bootsteps import forks

__all__ = ["ErrbackStep"]

PATIENCE = 30.0  # seconds that the end of the worker waits for them


class ErrbackStep(bootsteps.StartStopStep):
    """As `ReaperStep`, it ends after the pool, whose processes fail until then."""

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks, and a main process that runs none of them."""
        return forks(parent) and any(self._runtime.plans.values())

    def start(self, parent: Any) -> None:
        """Begin to take errbacks."""
        self._runtime.errbacks = _Errbacks()

    def stop(self, parent: Any) -> None:
        """Take no more, and wait for those that there are."""
        errbacks, self._runtime.errbacks = self._runtime.errbacks, None
        if errbacks is not None:
            errbacks.finish()

    terminate = stop


class _Errbacks:
    """A thread that calls them one after the other."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._caller = 0
        self._background = Background("distlock-errbacks", "an errback raised an exception")

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether Celery calls a task with *args* as an errback, in this worker's main process."""
        if os.getpid() != self._pid or threading.get_ident() == self._caller:
            return False
        return len(args) > 1 and isinstance(args[0], Context) and isinstance(args[1], BaseException)

    def submit(self, errback: Callable[[], object]) -> None:
        """Have it called soon."""
        self._background.submit(functools.partial(self._call, errback))

    def finish(self) -> None:
        self._background.finish(PATIENCE)

    def _call(self, errback: Callable[[], object]) -> None:
        self._caller = threading.get_ident()
        errback()
