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
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import StoreError
from .keys import key_of
from .naming import shown
from .stores.base import Peer, Wake

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["Relay", "by_room"]

logger = logging.getLogger(__name__)

MOST_TRIED = 3  # desks that turn out to be closed, before the broker is asked


class Relay:
    """See the module. One for each app."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.near = ""  # the desk of the worker whose task this process runs, or has run last

    def push(self, wake: Wake, message: Mapping[str, Any]) -> bool:
        """
        Push *wake* to a worker; false: the broker is for it.

        Args:
            wake: What was woken.
            message: Its envelope, decoded and checked.
        """
        store, near = self._runtime.store, self.near
        queues = self._runtime.trust.queues_of(message["exchange"], message["routing_key"])
        try:
            peers = by_room(store.find_desks(queues, [near] if near else []))
            peers.sort(key=lambda peer: peer.address != near)
            return store.push(wake, [peer.address for peer in peers[:MOST_TRIED]])
        except StoreError as error:
            words = "what was woken at %r goes by the broker: %s"
            logger.debug(words, shown(key_of(wake.name)), error)
            return False


def by_room(peers: Iterable[Peer]) -> list[Peer]:
    """Return *peers* at random: rather those that could start more tasks now, and the full last."""

    def draw(peer: Peer) -> tuple[bool, float]:
        return not peer.free, -math.log(1.0 - random.random()) / (peer.free or 1)

    return sorted(peers, key=draw)
