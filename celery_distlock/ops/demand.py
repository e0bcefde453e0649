"""How many calls wait, by the broker queue that they will be sent to."""

from collections import Counter
from collections.abc import Mapping, Sequence

from celery import Celery

from celery_distlock.runtime.routing import queue_names
from celery_distlock.stores import Ability, Store
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Destinations, KeyState

__all__ = ["Demand"]


class Demand:
    """
    Sums over keys.

    If many wait at a key, their queues are those of a part of them, in proportion.

    Attributes:
        kinds: Numbers by broker queue. ``waiting``: waiters, blocked or parked; blocked ones have
            an empty queue. ``in_flight``: woken tasks that have not claimed their key. ``later``:
            delayed calls that have not joined the key's queue.
    """

    def __init__(self, app: Celery, store: Store) -> None:
        self._app = app
        self._store = store
        self.kinds: dict[str, Counter[str]] = {
            kind: Counter() for kind in ("waiting", "in_flight", "later")
        }

    @property
    def queues(self) -> set[str]:
        """The broker queues that something waits for."""
        return set().union(*self.kinds.values())

    def add(self, keys: Sequence[str], states: Sequence[KeyState]) -> None:
        """Add *keys*, with their *states*."""
        some = [(key, state) for key, state in zip(keys, states, strict=True) if state.has_waiters]
        found = [Destinations()] * len(some)
        if some and Ability.QUEUE in self._store.abilities:
            parking = QueueStore.of(self._store).parking
            found = parking.destinations([key for key, _ in some])
        for (_, state), parts in zip(some, found, strict=True):
            self._divide(state.waiting, parts.waiting, "waiting")
            self._divide(state.woken, parts.woken, "in_flight")
            self._divide(state.later, parts.later, "later")

    def _divide(self, number: int, parts: Mapping[str, int], kind: str) -> None:
        """Add *number* to the queues, in the proportions of *parts*."""
        among, read, left = self.kinds[kind], sum(parts.values()), number
        for destination, part in parts.items() if number else ():
            share = left * part // read
            among[self._queue(destination)] += share
            left, read = left - share, read - part
        if left:
            among[""] += left

    def _queue(self, destination: str) -> str:
        if not destination:
            return ""
        exchange, _, routing_key = destination.partition(" ")
        return ",".join(queue_names(self._app, exchange, routing_key)) or routing_key
