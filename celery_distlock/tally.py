"""
Counts what happens to locks, for metrics: in this process, and every two seconds into the store.

So what a process counted in its last two seconds is lost if it is killed, and a count says nothing
about a moment. Whoever asks the store, says :meth:`Store.counts`, gets the sums of all processes
since the store began to count.
"""

import bisect
import os
from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from .errors import StoreError
from .stores import Ability, Store
from .teller import teller

__all__ = ["BUCKETS", "Sample", "flush", "note", "samples"]

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
_NOTHING: Mapping[str, Any] = {}
MOST = 100_000  # things seen in one round; what is more than that is not counted


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


class _Tally:
    """What this process has seen at one store, and not counted yet: that is for the thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: deque[tuple[str, str, Mapping[str, Any]]] = deque(maxlen=MOST)

    def add(self, name: str, task: str, facts: Mapping[str, Any]) -> None:
        self._seen.append((name, task, facts))
        if len(self._seen) == 1:
            teller().go_round(self.flush)

    def flush(self) -> None:
        """Tell the store; what it does not hear is counted no more."""
        counts: Counter[str] = Counter()
        while self._seen:
            name, task, facts = self._seen.popleft()
            counts[f"{name}||{task}"] += 1
            if name in _TIMED:
                fact, what = _TIMED[name]
                self._time(counts, what, task, facts[fact])
        if counts:
            self._store.count(counts)

    def _time(self, counts: Any, what: str, task: str, seconds: float) -> None:
        place = bisect.bisect_left(BUCKETS, seconds)
        bucket = f"{BUCKETS[place]:g}" if place < len(BUCKETS) else "+Inf"
        counts[f"{what}|{bucket}|{task}"] += 1
        counts[f"{what}|sum|{task}"] += seconds


_tallies: "WeakKeyDictionary[Store, _Tally]" = WeakKeyDictionary()


def note(store: Store, name: str, task: str = "", facts: Mapping[str, Any] = _NOTHING) -> None:
    """
    Count the event *name*.

    Args:
        store: Where it happened; one that cannot count is passed over.
        name: A signal's, or ``swept``.
        task: The task's name.
        facts: What the signal says; of grants and ends of holds, the times are counted, too.
    """
    counted = _COUNTED.get(name)
    if counted is None:
        return
    tally = _tallies.get(store)
    if tally is None:
        if Ability.LIST not in store.abilities:
            return
        tally = _tallies.setdefault(store, _Tally(store))
    tally.add(counted, task, facts)


def flush(store: Store) -> None:
    """
    Tell *store* now what this process has counted for it.

    Raises:
        StoreError: It does not answer; what it was to be told is counted no more.
    """
    tally = _tallies.get(store)
    if tally is not None:
        tally.flush()


def samples(store: Store) -> list[Sample]:
    """
    Return all that was ever counted in *store*.

    Raises:
        StoreError: It cannot count, or does not answer.
    """
    found = []
    for field, value in store.counts().items():
        name, _, rest = field.partition("|")
        bucket, bar, task = rest.partition("|")
        if not bar:
            raise StoreError(f"{store.identity}: {field!r} is no counter of ours")
        found.append(Sample(name, task, bucket, value))
    return found


def _after_fork() -> None:
    _tallies.clear()  # what the parent has counted, it tells itself


os.register_at_fork(after_in_child=_after_fork)
