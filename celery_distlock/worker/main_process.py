"""
Keeps the event loop of a prefork worker from waiting where Celery tells of a failure there.

Of a pool process that has died, or is over its hard time limit, it does so in the worker's main
process: it calls errbacks that take the request, the error and its traceback, and sends others, or
the task's retry. So

- an errback that is a locked task, and may have to wait for its key, is called by a thread;
- for the store, to take in what is sent through it, the loop waits a moment only: as where the
  store is away, it goes by the broker then.
"""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from celery import bootsteps
from celery.app.task import Context

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.process.background import Background
from celery_distlock.runtime.app import Runtime

from .bootsteps import forks
from .event_loop import PATIENCE, BoundedCaller

__all__ = ["MainProcessStep"]

T = TypeVar("T")

LAST_PATIENCE = 30.0  # seconds that the end of the worker waits for errbacks
NO_WAIT = 5.0  # seconds for which the loop does not wait for a store that did not answer


class MainProcessStep(bootsteps.StartStopStep):
    """As `ReaperStep`, it ends after the pool, whose processes fail until then."""

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks, and a main process that runs none of them."""
        return forks(parent) and any(self._runtime.plans.values())

    def start(self, parent: Any) -> None:
        """Begin to do so."""
        self._runtime.main_process = _MainProcess()

    def stop(self, parent: Any) -> None:
        """End, and wait for the errbacks that there are."""
        main_process, self._runtime.main_process = self._runtime.main_process, None
        if main_process is not None:
            main_process.finish()

    terminate = stop


class _MainProcess:
    """Made by the thread of the event loop."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = threading.get_ident()
        self._caller = 0
        self._errbacks = Background("distlock-errbacks", "an errback raised an exception")
        self._store = BoundedCaller("distlock-sending", patience=PATIENCE, pause=NO_WAIT)

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether Celery calls a task with *args* as an errback, in this process."""
        if os.getpid() != self._pid or threading.get_ident() == self._caller:
            return False
        return len(args) > 1 and isinstance(args[0], Context) and isinstance(args[1], BaseException)

    def call(self, errback: Callable[[], object]) -> None:
        """Have it called soon, after those before it."""
        self._errbacks.submit(functools.partial(self._call, errback))

    def ask(self, request: Callable[[], T]) -> T:
        """
        Do *request* of the store; in the event loop, wait a moment only.

        Raises:
            StoreUnavailableError: It is not done by then, but may be later.
        """
        if (os.getpid(), threading.get_ident()) != (self._pid, self._loop):
            return request()
        asked = self._store.ask(request)
        if not asked.done():
            raise StoreUnavailableError(f"a worker's main process waits {PATIENCE:g} s for it")
        return asked.result()

    def finish(self) -> None:
        self._store.close()
        self._errbacks.finish(LAST_PATIENCE)

    def _call(self, errback: Callable[[], object]) -> None:
        self._caller = threading.get_ident()
        errback()
