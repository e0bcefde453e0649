"""
Registers this worker with the store as a receiver of woken tasks, and keeps those reserved.

Once a second a thread reports to the store:

- The broker queues that the worker consumes, so that woken tasks of these queues come to its
  delivery channel, and the number of free slots: every other time, unless they have changed.
  Queues with a single active consumer are left out.
- The woken tasks that wait here, for a slot or because of Celery's rate limit or an ETA. No other
  process sends these unless this worker dies. Tasks that came by the broker are reported less
  often, since the broker delivers them again then.

A pushed task that waits for a slot here is pushed to another worker as well, if that consumes the
same queue and has a free slot. The worker that starts it second finds that it has ended.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from celery.worker import state

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.runtime.relay import by_room
from celery_distlock.runtime.routing import queue_names
from celery_distlock.stores import QueueStore
from celery_distlock.stores.values import PeerChannel, WokenTask

from .in_flight import free_slots, in_flight
from .request import LockedRequest, woken_requests

__all__ = ["Registration"]

logger = logging.getLogger(__name__)

INTERVAL = 1.0  # seconds between registrations
VALID_FOR = 4.0  # seconds of a registration; a push to a closed channel costs little
KEPT_FOR = 2.5  # seconds for which a task stays reserved without a report of its worker
FETCHED_FOR = 60.0  # the same for a task that came by the broker
FETCHED_AGAIN = 20.0  # seconds after which such a task is reported again


@dataclass(slots=True)
class _Taken:
    """A woken task, the message that Celery got, and the time until which it is reserved here."""

    wake: WokenTask
    message: Any
    pushed: bool
    kept_until: float = -math.inf

    @property
    def request(self) -> LockedRequest | None:
        """Celery's request of the message; None: not made yet, or already dropped."""
        found = woken_requests.get(self.message.delivery_tag)
        # Delivery tags start over with each connection to the broker.
        return found if found is not None and found.id == self.message.headers["id"] else None

    @property
    def waits(self) -> bool:
        """Whether its task has not begun here yet."""
        request = self.request
        if request is None:
            return self.message.headers["id"] in in_flight.followers
        return request.waits

    @property
    def waits_for_a_slot(self) -> bool:
        """Whether it would begin at once if the pool had room."""
        request = self.request
        return request is not None and request.waits and request in state.reserved_requests


class Registration:
    """
    Reports a worker's queues, free slots and waiting tasks; starts its thread at once.

    Args:
        consumer: Celery's consumer.
        address: The address of the worker's delivery channel.

    Attributes:
        queues: The broker queues that it is registered for.
    """

    def __init__(self, consumer: Any, store: QueueStore, address: str) -> None:
        self._consumer = consumer
        self._store = store
        self._address = address
        self.queues: set[str] = set()
        self._reported: tuple[list[str], int] | None = None
        self._waiting: dict[tuple[str, str], _Taken] = {}
        self._stopped = threading.Event()
        self._failing = False
        self._thread = DaemonThread("distlock-registration", self._run)
        self._thread.start()

    def add(self, wake: WokenTask, message: Any) -> None:
        """Keep *wake* reserved for this worker until the task of *message* has begun."""
        self._waiting[wake.name, wake.run] = _Taken(wake, message, pushed=True)

    def add_fetched(self, wake: WokenTask, message: Any) -> None:
        """Keep *wake* reserved as `add` does; *message* came by the broker."""
        self._waiting[wake.name, wake.run] = _Taken(wake, message, pushed=False)

    def close(self) -> None:
        """Withdraw; does not wait for the store."""
        self._stopped.set()

    def _run(self) -> None:
        self._try(self._register)
        while not self._stopped.wait(INTERVAL):
            self._try(self._register)
        self._try(self._withdraw_all)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001  # it is logged
            log_safely(
                logger,
                logging.DEBUG if self._failing else logging.INFO,
                "the lock store %s cannot push tasks to this worker now, so they come through the"
                " broker, later; trying again every %g s: %s",
                self._store.address,
                INTERVAL,
                error,
            )
            if not isinstance(error, StoreError):
                text = "unexpected error while registering for woken tasks"
                log_safely(logger, logging.ERROR, text, exc_info=True)
            self._failing = True
        else:
            if self._failing:
                text = "the lock store %s can push tasks to this worker again"
                log_safely(logger, logging.INFO, text, self._store.address)
            self._failing = False

    def _register(self) -> None:
        taken = getattr(self._consumer.task_consumer, "queues", ())
        queues = {queue.name for queue in taken if not _has_one_taker(queue)}
        self._withdraw(self.queues - queues)
        self.queues |= queues
        if queues:
            self._report(sorted(queues))
        self._keep()

    def _report(self, queues: list[str]) -> None:
        free = free_slots(self._consumer.pool)
        before, self._reported = self._reported, None
        if before != (queues, free):
            me = PeerChannel(self._address, free)
            self._store.channels.register_channel(queues, me, VALID_FOR)
            self._reported = queues, free

    def _keep(self) -> None:
        waiting = self._still_waiting()
        pushed = [each for each in waiting if each.pushed]
        self._store.parking.keep_reserved([each.wake for each in pushed], KEPT_FOR)
        self._keep_fetched([each for each in waiting if not each.pushed])
        # Not tasks that wait for earlier tasks of this worker, or that would wait elsewhere, too.
        self._pass_on([each for each in pushed if each.waits_for_a_slot])

    def _keep_fetched(self, fetched: list[_Taken]) -> None:
        """Keep the store from treating fetched tasks as lost: they left the broker's queue."""
        now = clock.monotonic()
        due = [each for each in fetched if each.kept_until < now + FETCHED_FOR - FETCHED_AGAIN]
        if due:
            self._store.parking.keep_reserved([each.wake for each in due], FETCHED_FOR)
        for each in due:
            each.kept_until = now + FETCHED_FOR

    def _withdraw_all(self) -> None:
        self._withdraw(self.queues)
        # Celery has dropped its tasks by now. The store knows which of them have begun.
        pushed = [each.wake for each in self._waiting.values() if each.pushed]
        self._store.parking.keep_reserved(pushed, 0.0)

    def _withdraw(self, queues: Iterable[str]) -> None:
        gone = sorted(queues)
        if gone:
            self._store.channels.register_channel(gone, PeerChannel(self._address, 0), 0.0)
            self.queues.difference_update(gone)

    def _pass_on(self, movable: list[_Taken]) -> None:
        """Push tasks that wait for a slot to workers with free slots that consume their queues."""
        by_queues: dict[tuple[str, ...], list[WokenTask]] = {}
        for each in movable:
            by_queues.setdefault(self._queues_of(each.message), []).append(each.wake)
        for queues, wakes in by_queues.items():
            peers = [each for each in self._store.channels.find_channels(queues) if each.free]
            others = by_room(peer for peer in peers if peer.address != self._address)
            room = [peer.address for peer in others for _ in range(peer.free)]
            for wake, address in zip(wakes, room, strict=False):
                if self._store.channels.push(wake, [address]):
                    self._waiting.pop((wake.name, wake.run), None)

    def _queues_of(self, message: Any) -> tuple[str, ...]:
        where = message.delivery_info
        return tuple(queue_names(self._consumer.app, where["exchange"], where["routing_key"]))

    def _still_waiting(self) -> list[_Taken]:
        for run, taken in list(self._waiting.items()):
            if not taken.waits:
                self._waiting.pop(run, None)
        return list(self._waiting.values())


def _has_one_taker(queue: Any) -> bool:
    """Whether *queue* has a single active consumer, which only RabbitMQ knows."""
    return bool((queue.queue_arguments or {}).get("x-single-active-consumer"))
