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
from celery_distlock.process.threads import DaemonThread
from celery_distlock.runtime.app import Runtime
from celery_distlock.runtime.routing import known_queues
from celery_distlock.stores import Ability, ListingStore
from celery_distlock.stores.base import Complaints
from celery_distlock.stores.queue_parts import Dues
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import KeyState
from celery_distlock.telemetry.counters import BUCKETS, Sample, samples

from .admin import Admin
from .demand import Demand
from .looks import lock_info

logger = logging.getLogger(__name__)

PATIENCE = 2.0  # seconds that a scrape waits for a reading; Prometheus waits for ten
ANSWER = 1.0  # seconds for the store to answer at all, if the reading takes longer
REST = 3.0  # the pause after a reading, as a multiple of its duration

_GAUGES = {
    "up": "Whether the lock store answers and can be read.",
    "read_seconds": "Seconds that reading the store took.",
    "read_age_seconds": "Seconds since these values were read.",
    "held": "Keys that are held; each holder of a shared key counts.",
    "longest_hold_seconds": "Age of the oldest current hold.",
    "units_held": "Units in use of shared keys with a capacity or an operator's limit.",
    "units_limit": "Units that may be in use of those keys.",
    "limited": "Keys that an operator has limited or paused, or a lane of them.",
    "paused": "Keys that an operator has paused.",
    "resting": "Keys that rest: without new grants for a while.",
    "waiting": "Waiters, blocked or parked.",
    "in_flight": "Woken tasks that have not claimed their key yet.",
    "later": "Delayed calls that have not joined a queue yet.",
    "oldest_waiter_seconds": "How long the oldest waiter has waited.",
    "due": "Keys that open through time alone, scheduled for the ticker.",
    "ticker": "Whether a worker is the ticker, which wakes tasks when keys become due.",
    "ticker_lag_seconds": "How long the first of the scheduled keys has been due.",
}
_TOTALS = (
    *("oldest_waiter_seconds", "units_held", "units_limit"),
    *("limited", "paused", "resting"),
)
_COUNTERS = {
    "acquired": "Grants.",
    "conflicts": "Requests that found their key held.",
    "released": "Releases by the holders.",
    "lost": "Locks that were lost while they were held.",
    "recalled": "Holders that were asked to leave.",
    "parked": "Tasks that were parked.",
    "woken": "Parked tasks that were granted their key.",
    "dropped": "Parked tasks that an operator dropped.",
    "joined": "Calls that were not sent: they joined an equal task that was pending.",
    "updated": "Calls that were not sent: a pending task has their arguments now.",
    "refused": "Calls and tasks that failed because their key's queue was full.",
}
_TASKLESS = {
    "freed": "Keys that were freed by an operator, or because a holder's process was gone.",
    "swept": "Parked tasks that were sent only because a sweep found them.",
}
_TIMES = {
    "wait": "Seconds from the first request for a key to its grant.",
    "hold": "Seconds for which a key was held.",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Values read from the store; `at` is the local monotonic time when the reading began."""

    metrics: list[Metric]
    at: float
    took: float


class StoreCollector(Collector):
    """
    Reads the store of *app* when Prometheus scrapes, at most once in *every* seconds.

    - It reads every key that is held or waited for, in short steps. This takes the server about a
      second per 100,000 keys. The next reading begins after three times that duration or later.
    - Of the calls that wait at one key, it reads the queues of at most a hundred.
    - A scrape in between gets the last values and their age.
    - Counters need the ability ``COUNT``. They never fall while the exporter runs, even if those of
      the store do because it was restored with older data.
    """

    def __init__(self, app: Celery, *, every: float = 5.0) -> None:
        self._app = app
        self._admin = Admin(app)
        self._every = every
        self._mutex = threading.Lock()
        self._reading: threading.Event | None = None  # set when the current reading ends
        self._due = -math.inf
        self._last: Reading | None = None
        self._refused = False
        self._queues: set[str] = set()
        self._complaints = Complaints()
        self._floors: dict[Sample, tuple[float, float]] = {}  # last value, and what is added to it

    def describe(self) -> list[Metric]:
        """Return all metrics without values: the registry needs their names."""
        return described()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, or only ``distlock_up`` if the store does not answer now."""
        asked_at = time.monotonic()
        self._refresh()
        last = self._last
        fresh = last is not None and last.at >= asked_at
        if self._refused or not (fresh or self._answers()):
            yield _gauge("up", 0)
            return
        yield _gauge("up", 1)
        if last is not None:
            yield _gauge("read_seconds", last.took)
            yield _gauge("read_age_seconds", time.monotonic() - last.at)
            yield from last.metrics

    def _refresh(self) -> None:
        """Start a reading if one is due, and wait up to `PATIENCE` seconds for it."""
        with self._mutex:
            reading = self._reading
            if reading is None and time.monotonic() >= self._due:
                reading = threading.Event()
                DaemonThread("distlock-exporter", self._read, reading).start()
                self._reading = reading  # only now: if no thread starts, the next scrape tries
        if reading is not None:
            reading.wait(PATIENCE)

    def _read(self, ended: threading.Event) -> None:
        began = time.monotonic()
        rest = self._every
        try:
            metrics = list(self._metrics())
        except StoreUnavailableError as error:
            logger.warning("could not read the metrics: the lock store does not answer: %s", error)
        except Exception as error:
            # Shown by `distlock_up` at once: it does not go away without an operator.
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
        """Yield the metrics of *read*, or log once that their record is malformed."""
        try:
            yield from list(read())
        except StoreUnavailableError:
            raise
        except StoreError as error:
            self._complaints.report(str(error), "some metrics are left out: %s", error)

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
        """Yield the counters, including those at 0: Prometheus would miss the first increment."""
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
        """Yield the gauges of held keys and waiters, by task where there is one."""
        store, totals = ListingStore.of(self._admin.store), Totals(time.time())
        demand = Demand(self._app, store)
        for keys in store.find_keys():
            states = store.inspect_many(keys)
            demand.add(keys, states)
            for key, state in zip(keys, states, strict=True):
                totals.add(lock_info(key, state))
        yield _gauge_by("task", "held", totals.held)
        yield _gauge_by("task", "longest_hold_seconds", totals.longest)
        # Queues at 0, too: an autoscaler must see the fall.
        self._queues.update({queue.name for queue in known_queues(self._app)}, demand.queues)
        for name, values in demand.kinds.items():
            yield _gauge_by("queue", name, {queue: values[queue] for queue in self._queues})
        for name, value in totals.plain.items():
            yield _gauge(name, value)


class Totals:
    """
    Totals over all keys.

    Attributes:
        held: The number of holds by task, with an empty name for a `Lock`.
        longest: The age of the oldest hold in seconds, by task.
        plain: The metrics without a label: values by the metric's name.
    """

    def __init__(self, now: float) -> None:
        self._now = now
        self.held: Counter[str] = Counter()
        self.longest: defaultdict[str, float] = defaultdict(float)
        self.plain: dict[str, float] = dict.fromkeys(_TOTALS, 0.0)

    def add(self, info: KeyState) -> None:
        """Add one key."""
        waited = self._passed(info.oldest)
        self.plain["oldest_waiter_seconds"] = max(self.plain["oldest_waiter_seconds"], waited)
        self.plain["limited"] += info.is_limited
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
    """Return *text* as valid UTF-8, with the other characters escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def described() -> list[Metric]:
    """Return all metrics without values."""
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


def _gauge_by(label: str, name: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"distlock_{name}", _GAUGES[name], labels=[label])
    for each, value in values.items():
        family.add_metric([_label(each)], value)
    return family


def _histogram(name: str, words: str, found: list[Sample]) -> Metric:
    labels = ["task", "for"] if name == "wait" else ["task"]
    family = HistogramMetricFamily(f"distlock_{name}_seconds", words, labels=labels)
    series: defaultdict[tuple[str, ...], dict[str, float]] = defaultdict(dict)
    for sample in found:
        of = (sample.task, sample.waited_for)[: len(labels)]
        series[of][sample.bucket] = sample.value
    for of, buckets in series.items():
        total = 0.0
        steps = []
        for end in [*(f"{bucket:g}" for bucket in BUCKETS), "+Inf"]:
            total += buckets.get(end, 0.0)
            steps.append((end, total))
        family.add_metric(of, steps, buckets.get("sum", 0.0))
    return family
