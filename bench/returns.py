"""
How long tasks with "retry" wait, and how many messages that takes: with and without an outage.

    python bench/returns.py [how often]

The wait of a task is compared with what it would be if each began, first come first served, at the
very moment at which its key is free and the store is there.
"""

import importlib
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from celery_distlock.testing import EmbeddedServer, die_with_parent

SLOTS = 8
LIMIT = 300.0  # seconds for one scenario
SEED = 7


class Scenario(NamedTuple):
    """So many tasks, spread over some seconds; and when the store goes, and for how long."""

    name: str
    tasks: int
    keys: int
    seconds: float  # that each holds its key; 0.5 to 1.5 times that
    spread: float
    outage: float = 0.0
    fault: str = ""


SCENARIOS = [
    Scenario("60 of 0.2 s, 2 keys", 60, 2, 0.2, 2.0),
    Scenario("100 of 0.05 s, 2 keys", 100, 2, 0.05, 1.0),
    Scenario("12 of 1.5 s, 1 key", 12, 1, 1.5, 2.0),
    Scenario("... store stands still for 6 s", 60, 2, 0.2, 2.0, 6.0, "pause"),
    Scenario("... store is gone for 6 s", 60, 2, 0.2, 2.0, 6.0, "kill"),
]


class Ran(NamedTuple):
    """What became of one task; times are seconds since the epoch."""

    key: str
    sent_at: float
    began_at: float
    ended_at: float


def main() -> None:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    print(f"{'':34}  median wait / ideal    longest wait / ideal    messages a task")
    for scenario in SCENARIOS:
        figures = [measure(scenario, SEED + number) for number in range(times)]
        median, ideal, longest, last, messages = (
            statistics.median(each) for each in zip(*figures, strict=True)
        )
        print(
            f"{scenario.name:34}  {median:5.2f} / {ideal:5.2f} s = {_ratio(median, ideal)}"
            f"   {longest:6.2f} / {last:5.2f} s = {_ratio(longest, last)}   {messages:5.2f}",
            flush=True,
        )


def _ratio(seconds: float, ideal: float) -> str:
    return f"{seconds / ideal:4.2f}" if ideal else "-"


def measure(scenario: Scenario, seed: int) -> tuple[float, ...]:
    chance = random.Random(seed)
    offsets = sorted(chance.uniform(0, scenario.spread) for _ in range(scenario.tasks))
    with EmbeddedServer() as broker, EmbeddedServer() as store, working(broker, store) as work:
        client = broker.client(decode_responses=True)
        for number in range(SLOTS):  # every process has run something
            work.delay(f"warm-{number}", 0.3, 0.0)
        wait(lambda: client.llen("returns:ran") == SLOTS)
        client.delete("returns:ran")
        before = messages(client)
        begin, back_at = time.time(), 0.0
        for number, offset in enumerate(offsets):
            if scenario.outage and not back_at and offset > scenario.spread / 2:
                gone_at = time.time()
                stop(store, scenario.fault)
                back_at = gone_at + scenario.outage
            time.sleep(max(0.0, begin + offset - time.time()))
            seconds = scenario.seconds * chance.uniform(0.5, 1.5)
            work.delay(f"key-{number % scenario.keys}", seconds, time.time())
        if back_at:
            time.sleep(max(0.0, back_at - time.time()))
            go_on(store, scenario.fault)
            back_at = time.time()
        wait(lambda: client.llen("returns:ran") == scenario.tasks)
        sent = messages(client) - before
        ran = [read(line) for line in client.lrange("returns:ran", 0, -1)]
        client.close()
    waits = [each.began_at - each.sent_at for each in ran]
    outage = (gone_at, back_at) if back_at else (0.0, 0.0)
    ideals = list(ideal_waits(ran, outage))
    return (
        statistics.median(waits),
        statistics.median(ideals),
        max(waits),
        max(ideals),
        sent / scenario.tasks,
    )


def read(line: str) -> Ran:
    key, *moments = line.split()
    return Ran(key, *map(float, moments))


def ideal_waits(ran: list[Ran], outage: tuple[float, float]) -> Iterator[float]:
    gone_at, back_at = outage
    by_key = sorted(ran, key=lambda each: (each.key, each.sent_at))
    for _, tasks in groupby(by_key, key=lambda each: each.key):
        free_at = 0.0
        for task in tasks:
            begin = max(task.sent_at, free_at)
            if gone_at <= begin < back_at:
                begin = back_at
            free_at = begin + task.ended_at - task.began_at
            yield begin - task.sent_at


def stop(store: EmbeddedServer, fault: str) -> None:
    store.pause() if fault == "pause" else store.kill()


def go_on(store: EmbeddedServer, fault: str) -> None:
    store.resume() if fault == "pause" else store.start()


def messages(client: Any) -> int:
    """How many messages were sent to the broker: each is pushed to a list there."""
    return int(client.info("commandstats").get("cmdstat_lpush", {}).get("calls", 0))


@contextmanager
def working(broker: EmbeddedServer, store: EmbeddedServer) -> Iterator[Any]:
    """A worker, and its task."""
    here = str(Path(__file__).parent)
    os.environ |= {"BENCH_URL": broker.url, "BENCH_STORE": store.url}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    command = [
        *(sys.executable, "-m", "celery", "-A", "returns_app", "worker", "-c", str(SLOTS)),
        *("--loglevel", "WARNING", "--without-gossip", "--without-mingle"),
    ]
    null = subprocess.DEVNULL
    worker = subprocess.Popen(die_with_parent(command), env=env, stdout=null, stderr=null)
    sys.modules.pop("returns_app", None)
    app = importlib.import_module("returns_app")
    try:
        yield app.work
    finally:
        worker.terminate()
        worker.wait(30)
        app.app.close()


def wait(is_so: Any) -> None:
    deadline = time.time() + LIMIT
    while not is_so():
        if time.time() > deadline:
            raise SystemExit("the tasks have not ended in time")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
