"""Takes parked tasks whose turn it is straight into the worker, past the broker."""

import collections
import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

from celery import bootsteps

from celery_distlock.envelope import to_message
from celery_distlock.errors import StoreError
from celery_distlock.runtime import Runtime
from celery_distlock.stores import Ability, Store
from celery_distlock.stores.base import Desk, Wake

__all__ = ["DeskStep"]

logger = logging.getLogger(__name__)


class DeskStep(bootsteps.StartStopStep):
    """
    Opens a desk while the worker consumes, and feeds what comes to it to Celery.

    The store keeps a pushed run until the process that runs it has its key, or, with late
    acknowledgement, until it has ended: here it may be dropped at any point. What is not taken in
    two seconds comes through the broker.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)
        self._desk: Desk | None = None
        self._hatch: _Hatch | None = None
        self._settler: _Settler | None = None

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks, and a store that parks."""
        runtime = self._runtime
        wanted = runtime.settings.enabled and any(runtime.plans.values())
        return wanted and Ability.PARK in runtime.store.abilities

    def start(self, parent: Any) -> None:
        """Open the desk."""
        store = self._runtime.store
        self._settler = _Settler(store)
        self._hatch = _Hatch(parent.hub, lambda wake: self._take(parent, wake))
        self._desk = store.desk(self._hatch.put)
        self._runtime.desk = self._desk.address if self._desk else ""
        self._runtime.forget = self._settler.forget

    def stop(self, parent: Any) -> None:
        """Close it: what wakes now goes through the broker, to another worker."""
        self._runtime.desk = ""
        self._runtime.forget = None
        for part in (self._desk, self._hatch, self._settler):
            if part is not None:
                part.close()
        self._desk = self._hatch = self._settler = None

    terminate = shutdown = stop

    def _take(self, consumer: Any, wake: Wake) -> None:
        message = to_message(consumer.app, wake.envelope)
        name = message.headers.get("task")
        strategy, settler = consumer.strategies.get(name), self._settler
        if strategy is None or settler is None:
            return  # the sweep sends it, to somebody who knows it
        late = consumer.app.tasks[name].acks_late
        ack, reject = settler.callbacks(wake, late=late)
        strategy(message, None, ack, reject, consumer.on_task_message)


class _Hatch:
    """
    Hands runs from the subscription's thread to the worker's event loop.

    Without an event loop (threads, solo, gevent) they are taken in that thread, as Celery's timer
    does with tasks that have an ETA.
    """

    def __init__(self, hub: Any, take: Callable[[Wake], None]) -> None:
        self._hub = hub
        self._take = take
        self._runs: collections.deque[Wake] = collections.deque()
        self._ends: tuple[int, int] | None = None
        if hub is not None:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
            hub.add_reader(self._ends[0], self._drain)

    def put(self, wake: Wake) -> None:
        self._runs.append(wake)
        if self._ends is None:
            self._empty()
        else:
            with contextlib.suppress(OSError):  # full: the loop is about to look anyway
                os.write(self._ends[1], b"!")

    def close(self) -> None:
        if self._ends is not None:
            self._hub.remove(self._ends[0])
            for end in self._ends:
                os.close(end)
            self._ends = None

    def _drain(self) -> None:
        if self._ends is not None:
            with contextlib.suppress(BlockingIOError):
                os.read(self._ends[0], 4096)
        self._empty()

    def _empty(self) -> None:
        while self._runs:
            wake = self._runs.popleft()
            try:
                self._take(wake)
            except Exception:
                logger.exception("a woken task at %s was not taken; the sweep sends it", wake.name)


class _Settler:
    """Tells the store what Celery says of a pushed message, off the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._told: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="distlock-settler", daemon=True).start()

    def callbacks(
        self, wake: Wake, *, late: bool
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """
        Return what Celery calls as ``ack`` and ``reject``.

        An early acknowledgement comes before the task has claimed its key, and the claim is then
        what strikes it from the store.
        """

        def acknowledge(*_: Any) -> None:
            if late:
                self.forget(wake)

        def reject(_logger: Any, _errors: Any, requeue: bool = False) -> None:
            if requeue:
                self._told.put(lambda: self._store.came_back(wake))
            else:
                self.forget(wake)

        return acknowledge, reject

    def forget(self, wake: Wake) -> None:
        """Drop a woken run that has ended, or will not run."""
        self._told.put(lambda: self._store.dispatch(self._store.drop(wake).wake))

    def close(self) -> None:
        self._told.put(None)

    def _run(self) -> None:
        while (tell := self._told.get()) is not None:
            try:
                tell()
            except StoreError as error:
                logger.warning("the end of a woken task was not noted: %s", error)
