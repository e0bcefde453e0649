"""
Gives a woken run whose own worker is gone to another one, past what waits in the broker.

Its turn has come, and its key stands idle until it runs. So it is pushed to the desk of a worker
that lives and consumes the run's broker queue. Whoever releases a key in a task gives it to its own
worker, where a slot is about to be free; all others, web code and sweeps say, and where the own
worker does not take it, to one that has free slots. Where none takes it, the broker does.
"""

import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.stores import Store
from celery_distlock.stores.base import PeerChannel, WokenTask

from .trust import Trust

__all__ = ["Relay", "by_room"]

logger = logging.getLogger(__name__)

MOST_TRIED = 3  # desks that turn out to be closed, before the broker is asked


class Relay:
    """See the module. One for each app."""

    def __init__(self, store: Callable[[], Store], trust: Trust) -> None:
        self._store = store
        self._trust = trust
        self.near = ""  # the desk of the worker whose task this process runs, or has run last

    def push(self, wake: WokenTask, message: Mapping[str, Any]) -> bool:
        """
        Push *wake* to a worker; false: the broker is for it.

        Args:
            wake: What was woken.
            message: Its envelope, decoded and checked.
        """
        store, near = self._store(), self.near
        queues = self._trust.queues_of(message["exchange"], message["routing_key"])
        try:
            peers = by_room(store.find_desks(queues, [near] if near else []))
            peers.sort(key=lambda peer: peer.address != near)
            return store.push(wake, [peer.address for peer in peers[:MOST_TRIED]])
        except StoreError as error:
            words = "what was woken at %r goes by the broker: %s"
            logger.debug(words, shown(key_of(wake.name)), error)
            return False


def by_room(peers: Iterable[PeerChannel]) -> list[PeerChannel]:
    """Return *peers* at random: rather those that could start more tasks now, and the full last."""

    def draw(peer: PeerChannel) -> tuple[bool, float]:
        return not peer.free, -math.log(1.0 - random.random()) / (peer.free or 1)

    return sorted(peers, key=draw)
