"""Says whose woken runs this worker takes, and looks after those that wait in its pool."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from celery.worker import state

from celery_distlock.errors import StoreError
from celery_distlock.runtime.relay import by_room
from celery_distlock.stores import Store
from celery_distlock.stores.base import PeerChannel, WokenTask
from celery_distlock.stores.identities import task_id_of

from .in_flight import in_flight

__all__ = ["Registration"]

logger = logging.getLogger(__name__)

BEAT = 1.0  # seconds
ALIVE = 4.0  # seconds for which a desk is known; a push to one that is closed costs little
KEPT = 2.5  # seconds for which a run is left to a worker that is not heard of


class Registration:
    """
    A thread that tells the store, once a second, what the others go by.

    Which broker queues the worker consumes, so that other workers' runs come to its desk, and how
    many slots are free. And which runs it has taken that wait for a slot: nobody else is to send
    those, unless this worker dies. Where another one has a free slot, such a run is given to that
    as well; whoever starts it second finds that it has ended.
    """

    def __init__(self, consumer: Any, store: Store, address: str) -> None:
        self._consumer = consumer
        self._store = store
        self._address = address
        self._noted: set[str] = set()  # queues
        self._waiting: dict[tuple[str, str], tuple[WokenTask, str]] = {}  # runs, their tasks' ids
        self._stopped = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="distlock-roster", daemon=True)
        self._thread.start()

    def add(self, wake: WokenTask, task_id: str) -> None:
        """Look after *wake*, whose task has come to the pool, until that is started."""
        self._waiting[wake.name, wake.run] = wake, task_id

    def close(self) -> None:
        """Take no more; does not wait until the store knows."""
        self._stopped.set()

    def _run(self) -> None:
        self._beat(self._meet)
        while not self._stopped.wait(BEAT):
            self._beat(self._meet)
        self._beat(self._leave)

    def _beat(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:
            report = logger.debug if self._failing else logger.info
            report("woken tasks of other workers may come by the broker alone: %s", error)
            if not isinstance(error, StoreError):
                logger.exception("what this worker takes was not told to others")
            self._failing = True
        else:
            self._failing = False

    def _meet(self) -> None:
        queues = {queue.name for queue in getattr(self._consumer.task_consumer, "queues", ())}
        self._withdraw(self._noted - queues)
        self._noted |= queues
        peers: list[PeerChannel] = []
        if queues:
            me = PeerChannel(self._address, self._free)
            peers = self._store.note_desk(sorted(queues), me, ALIVE)
        self._look_after(by_room(peer for peer in peers if peer.free))

    def _leave(self) -> None:
        self._withdraw(self._noted)
        # Celery has forgotten its tasks by now. Of those that have come, the store knows that.
        self._store.tend([wake for wake, _ in self._waiting.values()], 0.0)

    def _withdraw(self, queues: Iterable[str]) -> None:
        gone = sorted(queues)
        if gone:
            self._store.note_desk(gone, PeerChannel(self._address, 0), 0.0)
            self._noted.difference_update(gone)

    def _look_after(self, peers: list[PeerChannel]) -> None:
        waiting = self._still_waiting()
        self._store.tend(waiting, KEPT)
        room = [peer.address for peer in peers for _ in range(peer.free)] if waiting else []
        # Not those that are to come after others of this worker.
        followers = in_flight.followers
        movable = [wake for wake in waiting if task_id_of(wake.run) not in followers]
        for wake, address in zip(movable, room, strict=False):
            if self._store.push(wake, [address]):
                self._waiting.pop((wake.name, wake.run), None)

    def _still_waiting(self) -> list[WokenTask]:
        for run, (_, task_id) in list(self._waiting.items()):
            request = state.requests.get(task_id)
            if request is None and task_id in in_flight.followers:
                continue
            if request is None or request in state.active_requests:
                self._waiting.pop(run, None)
        return [wake for wake, _ in list(self._waiting.values())]

    @property
    def _free(self) -> int:
        slots = getattr(self._consumer.pool, "num_processes", None) or 0
        return max(0, int(slots) - len(state.reserved_requests))
