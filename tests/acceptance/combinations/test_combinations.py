"""
Contention, together with one more thing.

Each combination ends in the seconds that it names, its tasks run as often as they should, no two
believe at one time to have a key, tokens rise; and where an order is promised, it is kept.
"""

from __future__ import annotations

import signal
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from celery_distlock import clock
from tests.acceptance.combinations.series import Series, one_inside_another, one_of, some_of
from tests.waiting import wait_until
from tests.workers import WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.acceptance.combinations.crews import Crew
    from tests.acceptance.combinations.series import Keys, Options
    from tests.worker.conftest import Site


class Combination(NamedTuple):
    """
    Attributes:
        crew: A name in `CREWS`.
        tasks: Names in `tests.apps.combined`, which take turns.
        keys: Which keys each needs.
        count: How many are sent.
        limit: Seconds until all have ended, from when the first is sent. Some ten times what it
            takes where nothing else runs: a machine is busy, a live-lock has no end.
        attempts: How often each runs.
        in_order: Whether those of a key begin in the order in which they are sent to one worker.
        options: What else they are sent with.
    """

    crew: str
    tasks: Sequence[str] = ("requeued",)
    keys: Keys = one_of(3)
    count: int = 40
    limit: float = 15.0
    attempts: int = 1
    in_order: bool = True
    options: Options = lambda number: {}


def soon(number: int) -> dict[str, Any]:
    return {"countdown": 0.3}


def through_the_store(number: int) -> dict[str, Any]:
    return {"lock_via": "store"}


def some_first(number: int) -> dict[str, Any]:
    return {"priority": number % 10}


def one_of_a_kind(number: int) -> dict[str, Any]:
    return {"MessageDeduplicationId": f"sent-{number}", "MessageGroupId": f"group-{number}"}


SINGLES = ["requeued"]
PAIRS = ["of_two"]
TRIPLES = ["of_three"]
MIXED = ["requeued", "retried", "waiting", "skipped", "failing"]

COMBINATIONS = {
    "every slot but one idle": Combination("prefork", keys=one_of(1)),
    "one slot": Combination("one slot"),
    "two workers": Combination("two workers", in_order=False),
    "many slots": Combination("sixteen slots", keys=one_of(10), count=100),
    "more slots than keys": Combination("sixteen slots", keys=one_of(2)),
    "threads": Combination("threads"),
    "solo": Combination("solo"),
    "gevent": Combination("gevent"),
    "children that are replaced": Combination("short-lived children", limit=30.0),
    "autoscale": Combination("autoscale", count=60),
    "prefetch of one, late": Combination("prefetch of one, late"),
    "countdowns": Combination("prefork", options=soon, in_order=False),
    "priorities": Combination("prefork", options=some_first, in_order=False),
    # how they end
    "retries": Combination("prefork", ["coming_again"], count=20, attempts=2, in_order=False),
    "retries with the key": Combination("prefork", ["keeping_its_key"], count=15, attempts=2),
    "requeued failures": Combination("prefork", ["failing_once"], attempts=2, in_order=False),
    # other policies
    "retry": Combination("prefork", ["retried"], count=20, in_order=False),
    "wait": Combination("prefork", ["waiting"], in_order=False),
    "mixed policies": Combination("sixteen slots", MIXED, keys=one_of(2), in_order=False),
    "mixed policies, every slot waits": Combination(
        "two workers", MIXED, keys=one_of(2), limit=60.0, in_order=False
    ),
    # more than one key
    "nested": Combination("prefork", ["with_another_inside"], keys=one_inside_another(3, 2)),
    "nested, threads": Combination(
        "threads", ["with_another_inside"], keys=one_inside_another(3, 2)
    ),
    "pairs": Combination("prefork", PAIRS, keys=some_of(6, 2)),
    "pairs, threads": Combination("threads", PAIRS, keys=some_of(6, 2)),
    "pairs, two workers": Combination("two workers", PAIRS, keys=some_of(6, 2), in_order=False),
    "pairs, late": Combination("prefetch of one, late", PAIRS, keys=some_of(6, 2)),
    "pairs in a cluster": Combination("cluster", PAIRS, keys=some_of(6, 2)),
    "triples": Combination("prefork", TRIPLES, keys=some_of(8, 3)),
    "pairs and singles": Combination("prefork", SINGLES + PAIRS, keys=some_of(6, 2)),
    # other brokers and stores
    "classic queues": Combination("classic queues"),
    "classic queues, retry": Combination("classic queues", ["retried"], in_order=False),
    "classic queues, retries": Combination(
        "classic queues", ["coming_again"], count=20, attempts=2, in_order=False
    ),
    "quorum queues": Combination("quorum queues"),
    "quorum queues, retry": Combination("quorum queues", ["retried"], count=20, in_order=False),
    "files": Combination("files", in_order=False),  # kombu sorts them by milliseconds
    "SQS": Combination("SQS", limit=60.0, in_order=False),
    "SQS, retry": Combination("SQS", ["retried"], count=20, limit=60.0, in_order=False),
    "SQS, deduplicated": Combination(
        "SQS, first in, first out",
        ["requeued", "retried"],
        count=20,
        limit=60.0,
        in_order=False,
        options=one_of_a_kind,
    ),
    "PGMQ": Combination("PGMQ", limit=60.0, in_order=False),
    "PGMQ, retry": Combination("PGMQ", ["retried"], count=20, limit=60.0, in_order=False),
    "PGMQ, through the store": Combination("PGMQ", limit=60.0, options=through_the_store),
    "memory": Combination("memory"),
    "sentinels": Combination("sentinels"),
    "replicas": Combination("replicas"),
    "cluster": Combination("cluster"),
}


def tried(name: str) -> Any:
    combination = COMBINATIONS[name]
    return pytest.param(combination.crew, combination, id=name)


@pytest.mark.parametrize(
    ("crew", "combination"),
    [tried(name) for name in COMBINATIONS],
    indirect=["crew"],
    scope="module",  # so that those with one crew follow one another
)
def test_contention_with(site: Site, combination: Combination) -> None:
    series = Series(site, combination.tasks, combination.keys, combination.options)

    series.send(combination.count)
    ends = series.ended(combination.limit)

    allowed = {"ran", *("left" for name in combination.tasks if name == "skipped")}
    allowed.update("refused" for name in combination.tasks if name == "failing")
    assert {*ends} <= allowed
    assert series.attempts() == [combination.attempts * (end == "ran") for end in ends]
    assert series.faults({}) == []
    several = {*PAIRS, *TRIPLES} & {*combination.tasks}
    if (
        combination.in_order and not several
    ):  # those may pass each other at the keys after the first
        order = series.order()
        assert order == {key: sorted(numbers) for key, numbers in order.items()}


GENERATIONS = 2
BATCH = 40
SLOTS = 4  # of all workers together: what a cold stop can catch at work


@pytest.mark.parametrize("crew", ["deployed"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGQUIT], ids=["warm", "cold"])
def test_contention_during_a_rolling_deploy(
    request: pytest.FixtureRequest, site: Site, crew: Crew, signum: signal.Signals, tmp_path: Path
) -> None:
    series = Series(site, SINGLES, one_of(3))
    stopped: dict[str, float] = {}

    for _ in range(GENERATIONS):
        leaving = site.workers
        recruit(site, crew, tmp_path)
        begin(series)
        for worker in leaving:
            stopped[worker.name] = clock.monotonic()
            worker.process.send_signal(signum)
            request.addfinalizer(partial(dismiss, worker))
        site.workers = site.workers[len(leaving) :]
    # One whose process died before its result was stored is held back for a lease, 30 s.
    ends = series.ended(90.0)

    assert {*ends} == {"ran"}
    attempts = series.attempts()
    assert min(attempts) == 1
    repeated = sum(attempts) - len(attempts)
    assert repeated <= (GENERATIONS * SLOTS if signum == signal.SIGQUIT else 0)
    assert series.faults(stopped) == []


def recruit(site: Site, crew: Crew, folder: Path) -> None:
    """Start as many workers again as there are."""
    workers = [
        WorkerProcess(site.tasks.__name__, folder=folder, env=site.env, **arguments)
        for arguments in crew.workers
    ]
    site.workers = [*site.workers, *workers]
    for worker in workers:
        worker.start(wait=False)
    for worker in workers:
        worker.wait_ready()


def begin(series: Series) -> None:
    """Send some more tasks, and return when the first of them are at work."""
    before = sum(series.attempts())
    series.send(BATCH)
    wait_until(lambda: sum(series.attempts()) > before, what="a beginning")


def dismiss(worker: WorkerProcess) -> None:
    # It has nothing left to do; billiard can take half a minute to notice that.
    worker.kill(whole=True)
    print(f"---- {worker.name}", worker.log(), sep="\n")  # noqa: T201
