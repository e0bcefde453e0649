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
        waiting: Waiters, blocked or parked, by broker queue; blocked ones have an empty one.
        in_flight: Woken tasks that have not claimed their key.
        later: Delayed calls that have not joined a queue yet.
    """

    def __init__(self, app: Celery, store: Store) -> None:
        self._app = app
        self._store = store
        self.waiting: Counter[str] = Counter()
        self.in_flight: Counter[str] = Counter()
        self.later: Counter[str] = Counter()

    def add(self, keys: Sequence[str], states: Sequence[KeyState]) -> None:
        """Add *keys*, with their *states*."""
        some = [(key, state) for key, state in zip(keys, states, strict=True) if state.has_waiters]
        found = [Destinations()] * len(some)
        if some and Ability.QUEUE in self._store.abilities:
            parking = QueueStore.of(self._store).parking
            found = parking.destinations([key for key, _ in some])
        for (_, state), parts in zip(some, found, strict=True):
            self._divide(state.waiting, parts.waiting, self.waiting)
            self._divide(state.woken, parts.woken, self.in_flight)
            self._divide(state.later, parts.later, self.later)

    def _divide(self, number: int, parts: Mapping[str, int], among: Counter[str]) -> None:
        """Add *number* to the queues, in the proportions of *parts*."""
        read, left = sum(parts.values()), number
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
