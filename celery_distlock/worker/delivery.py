"""
Receives woken tasks directly from the lock store, without the broker, and starts them first.

- The store keeps a pushed task until the process that runs it holds its key, or, with late
  acknowledgement, until it has ended. So the push may be dropped at any point here.
- A task that no worker starts within two seconds is sent by the broker.
- Messages are decoded in the listening thread, started in the event loop, and acknowledged to the
  store in a third thread.
"""

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from celery import bootsteps
from kombu.message import Message

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.background import Background
from celery_distlock.process.threads import DaemonThread
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.message_facts import Received
from celery_distlock.runtime.messages import to_message
from celery_distlock.runtime.trust import RefusedError
from celery_distlock.stores import QueueStore
from celery_distlock.stores.channels import DeliveryChannel
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.values import WokenTask

from .arrival import can_park
from .event_loop import LoopCalls
from .in_flight import in_flight
from .registration import Registration

__all__ = ["DeliveryStep", "Precedence"]

logger = logging.getLogger(__name__)

_NOT_STARTED = "unexpected error while starting a woken task of key %r; the sweeper sends it again"


_NOT_DROPPED = (
    "the end of a woken task was not recorded; the sweeper resends it, and it is dropped if it ran"
)


class DeliveryStep(bootsteps.StartStopStep):
    """Opens a delivery channel while the worker consumes, and passes its messages to Celery."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._runtime = Runtime.of(parent.app)
        self._channel: DeliveryChannel | None = None
        self._calls: LoopCalls | None = None
        self._ack_worker: _AckWorker | None = None
        self._registration: Registration | None = None
        self._first = Precedence(None)

    def include_if(self, parent: Any) -> bool:
        """Whether there are locked tasks and a store that can park."""
        return can_park(self._runtime)

    def start(self, parent: Any) -> None:
        """Open the channel."""
        store = QueueStore.of(self._runtime.store)
        self._ack_worker = _AckWorker(store)
        self._first = Precedence(parent.controller)
        # Without an event loop they are started in the subscribing thread, as Celery's timer starts
        # tasks with an ETA.
        self._calls = calls = LoopCalls(parent.hub, lambda call: call())
        self._channel = store.channels.open_channel(functools.partial(self._receive, parent, calls))
        self._runtime.delivery_address = self._runtime.relay.main_address = self._channel.address
        self._runtime.drop_reserved = self._ack_worker.forget_all
        self._registration = Registration(parent, store, self._channel.address)
        self._runtime.delivery_queues = self._registration.queues
        self._runtime.fetched = self._registration.add_fetched

    def stop(self, parent: Any) -> None:
        """Close the channel: tasks woken later go to other workers, or to the broker."""
        self._runtime.delivery_address = self._runtime.relay.main_address = ""
        self._runtime.delivery_queues = ()
        self._runtime.drop_reserved = self._runtime.fetched = None
        for part in (self._registration, self._channel, self._calls, self._ack_worker):
            if part is not None:
                part.close()
        self._registration = self._channel = self._calls = self._ack_worker = None

    terminate = shutdown = stop

    def _receive(self, consumer: Any, calls: LoopCalls, wake: WokenTask) -> None:
        """Decode the message, which may be large, and hand it to the event loop."""
        trust = self._runtime.trust
        try:
            envelope = trust.check(wake)
            message = to_message(consumer.app, envelope, returned=wake.returned)
        except RefusedError as refusal:
            trust.refuse(wake, refusal)
        except Exception:
            logger.exception(_NOT_STARTED, shown(key_of(wake.name)))
        else:
            calls.put(functools.partial(self._try, consumer, wake, message))

    def _try(self, consumer: Any, wake: WokenTask, message: Message) -> None:
        try:
            self._take(consumer, wake, message)
        except Exception:
            logger.exception(_NOT_STARTED, shown(key_of(wake.name)))

    def _take(self, consumer: Any, wake: WokenTask, message: Message) -> None:
        for giver in wake.givers:
            in_flight.note_served(task_id_of(giver))
        if wake.arrival:
            Received.note(message, arrival=wake.arrival)
        name = message.headers.get("task")
        strategy, ack_worker = consumer.strategies.get(name), self._ack_worker
        if strategy is None or ack_worker is None:
            return  # the sweeper sends it to a worker that knows the task
        late = consumer.app.tasks[name].acks_late
        ack, reject = ack_worker.callbacks(wake._replace(envelope=b""), late=late)
        with self._first():
            strategy(message, None, ack, reject, consumer.on_task_message)
        if self._registration is not None:
            self._registration.add(wake, message)


class Precedence:
    """
    A context manager that lets a woken task start first in a prefork pool.

    - It overtakes tasks that were not woken: it arrived before them, and its key is idle.
    - It never overtakes another woken task.
    - Without an event loop (threads, gevent, solo) tasks begin in the order in which the pool got
      them.
    """

    def __init__(self, controller: Any) -> None:
        # A private attribute of kombu; without it, a woken task goes last like any other.
        semaphore = getattr(controller, "semaphore", None)
        self._waiting: deque[Any] | None = getattr(semaphore, "_waiting", None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Move the one task that the block gives to the pool to the front."""
        waiting = self._waiting
        before = len(waiting) if waiting is not None else 0
        yield
        if waiting is not None and len(waiting) == before + 1:
            self._put_first(waiting)

    def _put_first(self, waiting: deque[Any]) -> None:
        task = _Woken(waiting.pop())
        place = next(
            (n for n, each in enumerate(waiting) if type(each) is not _Woken), len(waiting)
        )
        waiting.insert(place, task)


class _Woken(tuple[Any, ...]):
    """A woken task that waits for a slot."""

    __slots__ = ()


class _AckWorker:
    """Passes acknowledgements and rejections of pushed messages to the store, in a thread."""

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._background = Background("distlock-acks", _NOT_DROPPED)
        self._closed = False

    def callbacks(
        self, wake: WokenTask, *, late: bool
    ) -> tuple[Callable[..., None], Callable[..., None]]:
        """
        Return the functions that Celery calls as ``ack`` and ``reject``.

        An early acknowledgement comes before the task has claimed its key; then the claim removes
        the message from the store.
        """

        def acknowledge(*_: Any) -> None:
            if late:
                self.forget(wake)

        def reject(_logger: Any, _errors: Any, requeue: bool = False) -> None:
            if requeue:
                self._submit(lambda: self._store.parking.mark_returned(wake))
            else:
                self.forget(wake)

        return acknowledge, reject

    def forget(self, wake: WokenTask) -> None:
        """Drop a woken task that has ended, or will not run."""
        self.forget_all(lambda: [wake])

    def forget_all(self, find: Callable[[], Iterable[WokenTask]]) -> None:
        """Drop all woken tasks that *find* yields; it is called in the thread."""

        def drop() -> None:
            for wake in find():
                self._store.dispatch(self._store.drop(wake).wake)

        self._submit(drop)

    def close(self) -> None:
        """
        Stop the thread after the work submitted so far; does not wait for it.

        Tasks of a closed consumer may end later; each of them then gets its own thread.
        """
        self._closed = True
        self._background.stop()

    def _submit(self, call: Callable[[], object]) -> None:
        def report() -> None:
            try:
                call()
            except StoreError as error:
                logger.warning("%s: %s", _NOT_DROPPED, error)

        if self._closed:
            DaemonThread("distlock-ack", report).start()
        else:
            self._background.submit(report)
