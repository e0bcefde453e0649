"""Takes parked tasks whose turn it is straight into the worker, past the broker."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from kombu.message import Message

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.background import Background
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.messages import to_message
from celery_distlock.runtime.trust import RefusedError
from celery_distlock.stores import Store
from celery_distlock.stores.base import DeliveryChannel, WokenTask

from .event_loop import LoopCalls
from .parking import parks
from .precedence import Precedence
from .registration import Registration

__all__ = ["DeliveryStep"]

logger = logging.getLogger(__name__)

_NOT_TAKEN = "a woken task at %r was not taken; the sweep sends it"


class DeliveryStep(bootsteps.StartStopStep):
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
        self._desk: DeliveryChannel | None = None
        self._calls: LoopCalls | None = None
        self._settler: _AckWorker | None = None
        self._roster: Registration | None = None
        self._first = Precedence(None)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks, and a store that parks."""
        return parks(self._runtime)

    def start(self, parent: Any) -> None:
        """Open the desk."""
        store = self._runtime.store
        self._settler = _AckWorker(store)
        self._first = Precedence(parent.controller)
        # Without an event loop they are taken in the thread that listens, as Celery's timer does
        # with tasks that have an ETA.
        self._calls = calls = LoopCalls(parent.hub, lambda call: call())
        self._desk = store.desk(functools.partial(self._receive, parent, calls))
        self._runtime.desk = self._desk.address if self._desk else ""
        self._runtime.forget = self._settler.forget
        if self._desk:
            self._roster = Registration(parent, store, self._desk.address)

    def stop(self, parent: Any) -> None:
        """Close it: what wakes now goes through the broker, to another worker."""
        self._runtime.desk = ""
        self._runtime.forget = None
        for part in (self._roster, self._desk, self._calls, self._settler):
            if part is not None:
                part.close()
        self._roster = self._desk = self._calls = self._settler = None

    terminate = shutdown = stop

    def _receive(self, consumer: Any, calls: LoopCalls, wake: WokenTask) -> None:
        """Hand what is pushed to the event loop; it is read here, for that takes long if it is."""
        trust = self._runtime.trust
        try:
            message = to_message(consumer.app, trust.check(wake))
        except RefusedError as refusal:
            trust.refuse(wake, refusal)
        except Exception:
            logger.exception(_NOT_TAKEN, shown(key_of(wake.name)))
        else:
            calls.put(functools.partial(self._try, consumer, wake, message))

    def _try(self, consumer: Any, wake: WokenTask, message: Message) -> None:
        try:
            self._take(consumer, wake, message)
        except Exception:
            logger.exception(_NOT_TAKEN, shown(key_of(wake.name)))

    def _take(self, consumer: Any, wake: WokenTask, message: Message) -> None:
        name = message.headers.get("task")
        strategy, settler = consumer.strategies.get(name), self._settler
        if strategy is None or settler is None:
            return  # the sweep sends it, to somebody who knows it
        late = consumer.app.tasks[name].acks_late
        ack, reject = settler.callbacks(wake._replace(envelope=b""), late=late)
        with self._first():
            strategy(message, None, ack, reject, consumer.on_task_message)
        if self._roster is not None:
            self._roster.add(wake, message.headers["id"])


class _AckWorker:
    """Tells the store what Celery says of a pushed message, off the event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._background = Background("distlock-acks", "the end of a woken task was not noted")

    def callbacks(
        self, wake: WokenTask, *, late: bool
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
                self._submit(lambda: self._store.came_back(wake))
            else:
                self.forget(wake)

        return acknowledge, reject

    def forget(self, wake: WokenTask) -> None:
        """Drop a woken run that has ended, or will not run."""
        self._submit(lambda: self._store.dispatch(self._store.drop(wake).wake))

    def close(self) -> None:
        """End after what was told until now; does not wait for it."""
        self._background.stop()

    def _submit(self, tell: Callable[[], object]) -> None:
        def report() -> None:
            try:
                tell()
            except StoreError as error:
                logger.warning("the end of a woken task was not noted: %s", error)

        self._background.submit(report)
