"""
Sends a woken task straight to a worker, ahead of what waits in the broker's queue.

Its key is reserved and idle until it runs. So it is pushed to the delivery channel of a live worker
that consumes its broker queue. A task that releases a key pushes to its own worker, where a slot is
about to be free. Other processes (web code, sweeps) push to a worker with free slots, and so does a
task whose own worker does not accept it. If no worker accepts it, it is sent by the broker.

A call that was sent through the store has not waited in the broker's queue. Where no slot is free
for it, it waits there now: thousands may be due at once, and workers fetch only what they can run.
"""

import collections
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery import Celery

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.stores import QueueStore, Store
from celery_distlock.stores.values import PeerChannel, WokenTask

from .message_facts import LockHeader
from .routing import queue_names

__all__ = ["Relay", "by_room"]

logger = logging.getLogger(__name__)

MOST_TRIED = 3  # delivery channels that turn out to be closed, before the broker is used
COUNTED_FOR = 1.5  # seconds until a worker's registered free slots reflect a push


class Relay:
    """Pushes the woken tasks of one app to workers."""

    def __init__(self, app: Celery, store: Callable[[], Store]) -> None:
        self._app = app
        self._store = store
        # Delivery channel of the worker whose task this process runs, or ran last.
        self.own_address = ""
        self._pushed: collections.deque[tuple[float, str]] = collections.deque()  # when, and where

    def push(self, woken: WokenTask, message: Mapping[str, Any]) -> bool:
        """
        Push a woken task to a worker; return false if none accepted it, so the broker must send it.

        Args:
            woken: The task.
            message: Its envelope, decoded and checked.
        """
        own = self.own_address
        queues = queue_names(self._app, message["exchange"], message["routing_key"])
        try:
            store = QueueStore.of(self._store())
            peers = by_room(store.channels.find_channels(queues, [own] if own else []))
            peers.sort(key=lambda peer: peer.address != own)
            is_call = LockHeader.of(message["headers"]).sent
            if is_call:
                peers = [each for each in peers if each.address == own or self._has_room(each)]
            addresses = [peer.address for peer in peers[:MOST_TRIED]]
            is_pushed = store.channels.push(woken, addresses)
            if is_pushed and is_call:
                self._pushed.append((clock.monotonic(), addresses[0]))
            return is_pushed
        except StoreError as error:
            words = "the task woken at %r is sent by the broker, not straight to a worker: %s"
            logger.debug(words, shown(key_of(woken.name)), error)
            return False

    def _has_room(self, peer: PeerChannel) -> bool:
        """Whether *peer* has more free slots than tasks that this process just pushed to it."""
        while self._pushed and clock.monotonic() > self._pushed[0][0] + COUNTED_FOR:
            self._pushed.popleft()
        return peer.free > sum(address == peer.address for _, address in self._pushed)


def by_room(peers: Iterable[PeerChannel]) -> list[PeerChannel]:
    """Return *peers* in random order, weighted by free slots; those without any come last."""

    def draw(peer: PeerChannel) -> tuple[bool, float]:
        return not peer.free, -math.log(1.0 - clock.jitter(0.0, 1.0)) / (peer.free or 1)

    return sorted(peers, key=draw)
