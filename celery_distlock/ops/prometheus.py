"""Metrics of the lock store for Prometheus; needs ``celery-distlock[metrics]``."""

import logging
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from celery import Celery
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import Ability, ListingStore
from celery_distlock.stores.base import Complaints
from celery_distlock.stores.queue_parts import Dues
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import KeyState
from celery_distlock.telemetry.counters import BUCKETS, Sample, samples

from .admin import Admin
from .looks import lock_info

__all__ = ["StoreCollector", "described"]

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds that a scrape waits for what is being read; Prometheus waits for ten
ANSWER = 1.0  # seconds for the store to answer at all, where the reading takes longer
REST = 3.0  # times as long as a reading took, the store has rest from the next one

_GAUGES = {
    "up": "Whether the lock store answers and can be read.",
    "read_seconds": "Seconds that reading the store took.",
    "read_age_seconds": "Seconds since what is told here was read.",
    "held": "Keys that are held; of one that several hold, each of them counts.",
    "longest_hold_seconds": "How long a key is held by now.",
    "units_held": "Units in use, of the keys that several hold up to a capacity.",
    "units_limit": "Units that may be in use, of those keys.",
    "limited": "Keys that an operator has limited, or paused.",
    "paused": "Keys that an operator has paused.",
    "resting": "Keys that nobody is let in to for a while.",
    "waiting": "Who waits for a key, blocked or parked.",
    "travelling": "Parked tasks that are on their way.",
    "later": "Calls that were sent for a later time.",
    "oldest_waiter_seconds": "How long the first has waited.",
    "due": "Keys that time alone opens, noted for the ticker.",
    "ticker": "Whether a worker looks after them.",
    "ticker_lag_seconds": "How long the first of them has been due.",
}
_TOTALS = (
    *("waiting", "travelling", "later", "oldest_waiter_seconds"),
    *("units_held", "units_limit", "limited", "paused", "resting"),
)
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


@dataclass(frozen=True, slots=True)
class Reading:
    """What the store held; `at` is when the reading began, by the local monotonic clock."""

    metrics: list[Metric]
    at: float
    took: float


class StoreCollector(Collector):
    """
    Reads the store of *app* when Prometheus asks, at most every *every* seconds.

    - It looks at every key that is held or waited for, in short steps; that takes the server about
      a second for each 100,000 keys. Then it leaves the store alone for three times as long.
    - A scrape meanwhile gets the last values, and their age.
    - Counters need the ability ``COUNT``. They never fall while the exporter runs, also if those of
      the store do because it came back with older data.
    """

    def __init__(self, app: Celery, *, every: float = 5.0) -> None:
        self._app = app
        self._admin = Admin(app)
        self._every = every
        self._mutex = threading.Lock()
        self._reading: threading.Event | None = None  # set at the end of the one under way
        self._due = -math.inf
        self._last: Reading | None = None
        self._refused = False
        self._complaints = Complaints()
        self._floors: dict[Sample, tuple[float, float]] = {}  # what was read last, and added to it

    def describe(self) -> list[Metric]:
        """Return all metrics without values: the registry needs their names."""
        return described()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; if the store does not answer now, only ``distlock_up``."""
        asked_at = time.monotonic()
        self._refresh()
        last = self._last
        fresh = last is not None and last.at >= asked_at
        if self._refused or not (fresh or self._answers()):
            yield _up(False)
            return
        yield _up(True)
        if last is not None:
            yield _gauge("read_seconds", last.took)
            yield _gauge("read_age_seconds", time.monotonic() - last.at)
            yield from last.metrics

    def _refresh(self) -> None:
        """Have the store read if it is time, and wait a while for a reading that is under way."""
        with self._mutex:
            reading = self._reading
            if reading is None and time.monotonic() >= self._due:
                reading = threading.Event()
                threading.Thread(
                    target=self._read, args=(reading,), name="distlock-exporter", daemon=True
                ).start()
                self._reading = reading  # last: if there can be no more threads, the next one tries
        if reading is not None:
            reading.wait(PATIENCE)

    def _read(self, ended: threading.Event) -> None:
        began = time.monotonic()
        rest = self._every
        try:
            metrics = list(self._metrics())
        except StoreUnavailableError as error:
            logger.warning("the metrics were not read: the lock store does not answer: %s", error)
        except Exception as error:
            # `distlock_up` shows it at once: it will not end by itself.
            self._refused = True
            logger.warning("distlock_up is 0: the lock store cannot be read: %s", error)
            if not isinstance(error, StoreError):
                logger.exception("unexpected error while reading the lock store")
        else:
            took = time.monotonic() - began
            self._last = Reading(metrics, began, took)
            self._refused = False
            rest = max(rest, REST * took)
        finally:
            with self._mutex:
                self._due = time.monotonic() + rest
                self._reading = None
            ended.set()

    def _answers(self) -> bool:
        try:
            self._admin.store.inspect("", ANSWER)
        except StoreError as error:
            logger.warning("distlock_up is 0: the lock store does not answer: %s", error)
            return False
        return True

    def _metrics(self) -> Iterator[Metric]:
        store = self._admin.store
        yield from self._keys()
        if Ability.QUEUE in store.abilities:
            yield from self._unless_refused(lambda: _timed(QueueStore.of(store).timetable.dues()))
        if Ability.COUNT in store.abilities:
            yield from self._unless_refused(
                lambda: self._counted(self._never_falling(samples(store)))
            )

    def _unless_refused(self, read: Callable[[], Iterator[Metric]]) -> Iterator[Metric]:
        """Leave metrics out whose one record is spoilt, and say so once: the others are told."""
        try:
            yield from list(read())
        except StoreUnavailableError:
            raise
        except StoreError as error:
            self._complaints.tell(str(error), "metrics are left out: %s", error)

    def _never_falling(self, found: list[Sample]) -> list[Sample]:
        raised = []
        for sample in found:
            place = sample._replace(value=0.0)
            last, added = self._floors.get(place, (0.0, 0.0))
            added += max(0.0, last - sample.value)
            self._floors[place] = sample.value, added
            raised.append(sample._replace(value=sample.value + added))
        return raised

    def _counted(self, found: list[Sample]) -> Iterator[Metric]:
        """Yield the counters, those at 0 too: Prometheus would else miss the first increment."""
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
        """Yield the gauges: what is held and waited for, by task where it has one."""
        store, totals = ListingStore.of(self._admin.store), Totals(time.time())
        for keys in store.find_keys():
            for key, state in zip(keys, store.inspect_many(keys), strict=True):
                totals.add(lock_info(key, state))
        yield _gauge_by_task("held", totals.held)
        yield _gauge_by_task("longest_hold_seconds", totals.longest)
        for name, value in totals.plain.items():
            yield _gauge(name, value)


class Totals:
    """
    Adds up what is the case at all keys.

    Attributes:
        held: How many hold a key, by task; a `Lock` has none.
        longest: Seconds for which the one has held it that has done so longest, likewise.
        plain: What is not told by task: values by the metric's name.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self.held: Counter[str] = Counter()
        self.longest: defaultdict[str, float] = defaultdict(float)
        self.plain: dict[str, float] = dict.fromkeys(_TOTALS, 0.0)

    def add(self, info: KeyState) -> None:
        """Add one key."""
        self.plain["waiting"] += info.waiting
        self.plain["travelling"] += info.woken
        self.plain["later"] += info.later
        waited = self._passed(info.oldest)
        self.plain["oldest_waiter_seconds"] = max(self.plain["oldest_waiter_seconds"], waited)
        self.plain["limited"] += info.limit is not None
        self.plain["paused"] += info.paused
        self.plain["resting"] += info.rest > 0 or info.state == "resting"
        if info.mode == "shared" and info.most is not None:
            self.plain["units_held"] += info.units
            self.plain["units_limit"] += info.most
        for hold in info.holds:
            if hold.state == "held":
                task = _label(hold.who.task) if hold.who.task_id else ""
                self.held[task] += 1
                self.longest[task] = max(self.longest[task], self._passed(hold.since))

    def _passed(self, since: float) -> float:
        return self._now - since if since else 0.0


def _label(text: str) -> str:
    """Return *text* as Prometheus can have it: what is no UTF-8 is spelt out."""
    return text.encode("utf-8", "backslashreplace").decode()


def described() -> list[Metric]:
    """Return all metrics that there can be, without values."""
    times = {f"{name}_seconds": words for name, words in _TIMES.items()}
    kinds = {"gauge": _GAUGES, "counter": {**_COUNTERS, **_TASKLESS}, "histogram": times}
    return [
        Metric(f"distlock_{name}", words, kind)
        for kind, metrics in kinds.items()
        for name, words in metrics.items()
    ]


def _timed(dues: Dues) -> Iterator[Metric]:
    yield _gauge("due", dues.many)
    yield _gauge("ticker", float(bool(dues.ticker)))
    yield _gauge("ticker_lag_seconds", max(0.0, -dues.first))


def _gauge(name: str, value: float) -> Metric:
    return GaugeMetricFamily(f"distlock_{name}", _GAUGES[name], value=value)


def _gauge_by_task(name: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"distlock_{name}", _GAUGES[name], labels=["task"])
    for task, value in values.items():
        family.add_metric([task], value)
    return family


def _up(answers: bool) -> Metric:
    return _gauge("up", float(answers))


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
