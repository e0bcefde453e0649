"""
Sends a woken task straight to a worker, ahead of what waits in the broker's queue.

Its key is reserved and idle until it runs. So it is pushed to the delivery channel of a live worker
that consumes its broker queue. A task that releases a key pushes to its own worker, where a slot is
about to be free. All others (web code, sweeps) push to a worker with free slots, and so does a task
whose own worker does not take it. If none takes it, it is sent by the broker.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery import Celery

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.stores import ParkingStore, Store
from celery_distlock.stores.values import PeerChannel, WokenTask

from .routing import queue_names

__all__ = ["Relay", "by_room"]

logger = logging.getLogger(__name__)

MOST_TRIED = 3  # delivery channels that turn out to be closed, before the broker is used


class Relay:
    """See the module. One for each app."""

    def __init__(self, app: Celery, store: Callable[[], Store]) -> None:
        self._app = app
        self._store = store
        # Where the worker takes woken tasks whose task this process runs, or has run last.
        self.own_address = ""

    def push(self, woken: WokenTask, message: Mapping[str, Any]) -> bool:
        """
        Push a woken task to a worker; false: none took it, so it is for the broker.

        Args:
            woken: The task.
            message: Its envelope, decoded and checked.
        """
        own = self.own_address
        queues = queue_names(self._app, message["exchange"], message["routing_key"])
        try:
            store = ParkingStore.of(self._store())
            peers = by_room(store.find_channels(queues, [own] if own else []))
            peers.sort(key=lambda peer: peer.address != own)
            return store.push(woken, [peer.address for peer in peers[:MOST_TRIED]])
        except StoreError as error:
            words = "the task woken at %r is sent by the broker, not straight to a worker: %s"
            logger.debug(words, shown(key_of(woken.name)), error)
            return False


def by_room(peers: Iterable[PeerChannel]) -> list[PeerChannel]:
    """Return *peers* in random order: more free slots, sooner; those without any come last."""

    def draw(peer: PeerChannel) -> tuple[bool, float]:
        return not peer.free, -math.log(1.0 - clock.jitter(0.0, 1.0)) / (peer.free or 1)

    return sorted(peers, key=draw)
