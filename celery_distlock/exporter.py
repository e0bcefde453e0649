"""What the store knows, for Prometheus; needs ``celery-distlock[metrics]``."""

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from celery import Celery
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from .admin import Admin, Holder
from .errors import StoreError
from .runtime import Runtime
from .stores import Ability
from .tally import BUCKETS, Sample, samples

__all__ = ["StoreCollector"]

logger = logging.getLogger(__name__)

PATIENCE = 3.0  # seconds for the store to be read; Prometheus itself waits for ten

_COUNTERS = {
    "acquired": "Grants, by the task that was granted a key.",
    "conflicts": "Keys that were found taken.",
    "released": "Keys that were given up in order.",
    "lost": "Locks that their holders have lost.",
    "parked": "Tasks that were parked.",
    "woken": "Parked tasks that got their key.",
    "dropped": "Parked tasks that an operator has dropped.",
}
_TASKLESS = {
    "freed": "Keys that were freed for somebody: a process that is gone, or by an operator.",
    "swept": "Parked tasks that were on their way again only because a sweep found them.",
}
_TIMES = {
    "wait": "Seconds from the first request for a key to the grant.",
    "hold": "Seconds that a key was held.",
}


class StoreCollector(Collector):
    """
    Reads the store of *app* when Prometheus asks, at most every *every* seconds.

    Looks at every key that is held or waited for, so that it costs the server about a second for
    each 100,000 of them, in short steps. What was counted is told if the store has the ability
    ``COUNT``; a counter never falls while the exporter runs, also if the store's does, because it
    came back with older data.
    """

    def __init__(self, app: Celery, *, every: float = 5.0) -> None:
        self._app = app
        self._admin = Admin(app)
        self._every = every
        self._mutex = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "distlock-exporter")
        self._reading: Future[list[Metric]] | None = None
        self._read_at = -math.inf
        self._last: list[Metric] = []
        self._floors: dict[Sample, tuple[float, float]] = {}  # what was read last, and added to it

    def describe(self) -> list[Metric]:
        """Nothing beforehand: what there is depends on the tasks."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; of a store that does not answer in three seconds, only that."""
        with self._mutex:
            if self._reading is None and time.monotonic() >= self._read_at + self._every:
                self._reading = self._reader.submit(self._read)
            if self._reading is not None:
                try:
                    self._last = self._reading.result(PATIENCE)
                except TimeoutError:
                    yield _up(False)
                    return
                self._reading, self._read_at = None, time.monotonic()
            yield from self._last

    def _read(self) -> list[Metric]:
        began = time.monotonic()
        try:
            found = list(self._keys())
            if Ability.COUNT in self._admin.store.abilities:
                found += self._counted(self._never_falling(samples(self._admin.store)))
        except StoreError as error:
            logger.warning("the store cannot be read: %s", error)
            return [_up(False)]
        took = time.monotonic() - began
        words = "Seconds that reading the store took."
        return [_up(True), _gauge("distlock_read_seconds", words, took), *found]

    def _never_falling(self, found: list[Sample]) -> list[Sample]:
        told = []
        for sample in found:
            place = sample._replace(value=0.0)
            last, added = self._floors.get(place, (0.0, 0.0))
            added += max(0.0, last - sample.value)
            self._floors[place] = sample.value, added
            told.append(sample._replace(value=sample.value + added))
        return told

    def _counted(self, found: list[Sample]) -> Iterator[Metric]:
        """What was ever counted; 0 is told, too, lest Prometheus miss the first."""
        plans = Runtime.of(self._app).plans
        tasks = {name for name, plan in plans.items() if plan} | {each.task for each in found}
        values = {(each.name, each.task): each.value for each in found if not each.bucket}
        for name, words in _COUNTERS.items():
            family = CounterMetricFamily(f"distlock_{name}", words, labels=["task"])
            for task in tasks:
                family.add_metric([task], values.get((name, task), 0.0))
            yield family
        for name, words in _TASKLESS.items():
            total = sum(each.value for each in found if each.name == name)
            yield CounterMetricFamily(f"distlock_{name}", words, value=total)
        for name, words in _TIMES.items():
            yield _histogram(name, words, [sample for sample in found if sample.name == name])

    def _keys(self) -> Iterator[Metric]:
        """What is the case now."""
        now, store = time.time(), self._admin.store
        held: Counter[str] = Counter()
        longest: defaultdict[str, float] = defaultdict(float)
        waiting = woken = 0
        oldest = 0.0
        for keys in store.find_keys():
            for state in store.look(keys):
                waiting += state.waiting
                woken += state.woken
                oldest = max(oldest, now - state.oldest if state.oldest else 0.0)
                if state.token and not state.waking:
                    task = Holder.of(state.owner).task if state.run else ""
                    held[task] += 1
                    longest[task] = max(longest[task], now - state.since)
        keys_held = GaugeMetricFamily("distlock_held", "Keys that are held.", labels=["task"])
        longest_hold = GaugeMetricFamily(
            "distlock_longest_hold_seconds", "How long a key is held by now.", labels=["task"]
        )
        for task, count in held.items():
            keys_held.add_metric([task], count)
            longest_hold.add_metric([task], longest[task])
        yield keys_held
        yield longest_hold
        yield _gauge("distlock_waiting", "Who waits for a key, blocked or parked.", waiting)
        yield _gauge("distlock_travelling", "Parked tasks that are on their way.", woken)
        yield _gauge("distlock_oldest_waiter_seconds", "How long the first has waited.", oldest)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=value)


def _up(answers: bool) -> Metric:
    return _gauge("distlock_up", "Whether the lock store answers.", float(answers))


def _histogram(name: str, words: str, found: list[Sample]) -> Metric:
    family = HistogramMetricFamily(f"distlock_{name}_seconds", words, labels=["task"])
    by_task: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for sample in found:
        by_task[sample.task][sample.bucket] = sample.value
    for task, buckets in by_task.items():
        total = 0.0
        steps = []
        for end in [*(f"{bucket:g}" for bucket in BUCKETS), "+Inf"]:
            total += buckets.get(end, 0.0)
            steps.append((end, total))
        family.add_metric([task], steps, buckets.get("sum", 0.0))
    return family
