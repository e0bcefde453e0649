"""
Counters for metrics: collected in this process and added to the store every two seconds.

If a process is killed, its counts of the last two seconds are lost.
:meth:`CountingStore.counts` returns the sums over all processes since the store began to count.
"""

import bisect
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakSet

from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores import Ability, CountingStore, Store

logger = logging.getLogger(__name__)

# Upper bounds of the histogram buckets for waits and holds, in seconds.
BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_NAMES = (*(f"{bound:g}" for bound in BUCKETS), "+Inf")

_COUNTED = {
    "lock_acquired": "acquired",
    "lock_conflict": "conflicts",
    "lock_lost": "lost",
    "lock_recalled": "recalled",
    "lock_released": "released",
    "lock_freed": "freed",
    "task_parked": "parked",
    "task_woken": "woken",
    "task_dropped": "dropped",
    "task_joined": "joined",
    "task_updated": "updated",
    "task_refused": "refused",
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
        name: ``acquired``, ``conflicts``, ...; ``wait`` and ``hold`` for durations.
        task: The task's name; empty for a ``Lock``.
        waited_for: For ``wait``: ``holder``, ``time`` or ``nothing``. Else empty.
        bucket: For durations: the upper bound of the bucket in seconds, where the value counts this
            bucket alone, not the ones below; or ``sum`` for their sum. Else empty.
        value: The count, or the sum in seconds.
    """

    name: str
    task: str
    waited_for: str
    bucket: str
    value: float


_refused: WeakSet[Store] = WeakSet()  # stores that have refused counts before


class Counters:
    """Collects counts per store until `flush`."""

    def __init__(self) -> None:
        self._counts: dict[CountingStore, Counter[str]] = {}

    def add(self, store: Store, name: str, task: str, facts: Mapping[str, Any]) -> None:
        """
        Count the event *name*.

        Args:
            store: The store of the lock; if it cannot count, nothing is counted.
            name: The name of a signal, or ``swept``.
            task: The task's name; empty for a ``Lock``.
            facts: The signal's arguments; the durations of grants and releases are counted, too.
        """
        counted = _COUNTED.get(name)
        if counted is None or Ability.COUNT not in store.abilities:
            return
        counts: Any = self._counts.get(store)  # type: ignore[call-overload]  # by identity
        if counts is None:
            counts = self._counts[CountingStore.of(store)] = Counter()
        counts[f"{counted}||{task}"] += 1
        if counted in _TIMED:
            fact, what = _TIMED[counted]
            seconds = facts[fact]
            what = f"{what}:{facts['waited_for']}" if what == "wait" else what
            bucket = _NAMES[bisect.bisect_left(BUCKETS, seconds)]
            counts[f"{what}|{bucket}|{task}"] += 1
            counts[f"{what}|sum|{task}"] += seconds

    def flush(self) -> None:
        """Add the counts to the stores, without a retry: those of an unavailable store are lost."""
        for store, counts in self._counts.items():
            try:
                store.count(counts)
            except StoreUnavailableError as error:
                logger.info(
                    "the latest lock counts are lost, the store %s does not answer: %s",
                    store.identity,
                    error,
                )
            except Exception as error:  # noqa: BLE001  # the other stores follow
                report = logger.debug if store in _refused else logger.warning
                report(
                    "the store %s refuses lock counts, so metrics lack them: %r",
                    store.identity,
                    error,
                )
                _refused.add(store)


def samples(store: Store) -> list[Sample]:
    """
    Return all counters of *store*.

    Raises:
        StoreError: *store* cannot count, or does not answer.
    """
    found = []
    for field, value in CountingStore.of(store).counts().items():
        name, _, rest = field.partition("|")
        bucket, bar, task = rest.partition("|")
        if bar:  # else it was written by another version
            kind, _, waited_for = name.partition(":")
            found.append(Sample(kind, task, waited_for, bucket, value))
    return found
