"""
Counts what happens to locks, for metrics: in this process, and every two seconds into the store.

If a process is killed, what it counted in its last two seconds is lost.
:meth:`CountingStore.counts` returns the sums over all processes, since the store began to count.
"""

import bisect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import Ability, CountingStore, Store

__all__ = ["BUCKETS", "Counters", "Sample", "samples"]

logger = logging.getLogger(__name__)

# Seconds; the upper ends of the buckets in which waits and holds are counted.
BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)

_COUNTED = {
    "lock_acquired": "acquired",
    "lock_conflict": "conflicts",
    "lock_lost": "lost",
    "lock_released": "released",
    "lock_freed": "freed",
    "task_parked": "parked",
    "task_woken": "woken",
    "task_dropped": "dropped",
    "swept": "swept",
}
_TIMED = {
    "acquired": ("waited", "wait"),
    "released": ("held", "hold"),
    "lost": ("held", "hold"),
}


class Sample(NamedTuple):
    """
    One counter.

    Attributes:
        name: ``acquired``, ``conflicts``, ...; ``wait`` and ``hold`` for the times.
        task: The task's name; empty for a ``Lock``.
        bucket: Of a time, the upper end in seconds of its bucket: of those that are no shorter than
            the bucket before; ``sum`` for all of them added up; else empty.
        value: How many, or the sum in seconds.
    """

    name: str
    task: str
    bucket: str
    value: float


_refused: WeakSet[Store] = WeakSet()  # the stores that are known to refuse counts


class Counters:
    """Counts events by the store in which they happened, until `flush`."""

    def __init__(self) -> None:
        self._counts: dict[CountingStore, Counter[str]] = {}

    def add(self, store: Store, name: str, task: str, facts: Mapping[str, Any]) -> None:
        """
        Count the event *name*.

        Args:
            store: Where it happened; if it cannot count, nothing is counted.
            name: A signal's, or ``swept``.
            task: The task's name; empty for a ``Lock``.
            facts: The signal's arguments; grants and releases have times, which are counted, too.
        """
        counted = _COUNTED.get(name)
        if counted is None or Ability.COUNT not in store.abilities:
            return
        counts: Any = self._counts.setdefault(CountingStore.of(store), Counter())
        counts[f"{counted}||{task}"] += 1
        if counted in _TIMED:
            fact, what = _TIMED[counted]
            seconds = facts[fact]
            place = bisect.bisect_left(BUCKETS, seconds)
            bucket = f"{BUCKETS[place]:g}" if place < len(BUCKETS) else "+Inf"
            counts[f"{what}|{bucket}|{task}"] += 1
            counts[f"{what}|sum|{task}"] += seconds

    def flush(self) -> None:
        """Add the counts to those in the stores, once; a store that does not answer loses them."""
        for store, counts in self._counts.items():
            try:
                store.count(counts)
            except StoreUnavailableError as error:
                logger.info(
                    "the last counts of locks are lost, the store %s does not answer: %s",
                    store.identity,
                    error,
                )
            except Exception as error:  # noqa: BLE001  # whatever one raises, the next one is asked
                report = logger.debug if store in _refused else logger.warning
                report(
                    "the store %s does not take counts, so metrics lack them: %r",
                    store.identity,
                    error,
                )
                _refused.add(store)


def samples(store: Store) -> list[Sample]:
    """
    Return all that was ever counted in *store*.

    Raises:
        StoreError: It cannot count, or does not answer.
    """
    found = []
    for field, value in CountingStore.of(store).counts().items():
        name, _, rest = field.partition("|")
        bucket, bar, task = rest.partition("|")
        if bar:  # else it is not of this version
            found.append(Sample(name, task, bucket, value))
    return found
