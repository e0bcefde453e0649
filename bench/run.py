"""
What a lock costs, side by side in one run: ``make bench``.

Every row is a ratio of two things that were timed in turn, so that a machine that is busy or slow
changes both. Absolute figures are for orientation only.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parked import ENVELOPE, FEW, MANY, beside_many, others_beside
from rich.console import Console
from rich.table import Table

from celery_distlock import Lock
from celery_distlock.stores import open_store
from celery_distlock.testing import EmbeddedServer

HERE = Path(__file__).parent
PAIRS = 2000  # acquire + release in one round
NOOPS = 2000  # tasks in one round
ROUNDS = 5
CONTENDED = 200  # tasks on one key
HOLD = 0.010  # seconds each
SLOTS = 4


def seconds(work: Callable[[], object]) -> float:
    """Return how long *work* takes."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def in_turn(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float, float]:
    """Return the medians of both over all rounds, and the median ratio one/other."""
    pairs = [(one(), other()) for _ in range(ROUNDS)]
    ratios = [a / b for a, b in pairs]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        statistics.median(ratios),
    )


def uncontended(server: EmbeddedServer) -> tuple[float, float, float]:
    """Time acquire + release of our lock, then of a bare SET NX PX and compare-and-delete."""
    client = server.client()
    compare_and_delete = client.register_script(
        "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end"
        " return 0"
    )
    lock = Lock("bench", store=server.url)

    def ours() -> None:
        for _ in range(PAIRS):
            lock.acquire()
            lock.release()

    def bare() -> None:
        for number in range(PAIRS):
            token = f"token-{number}"
            client.set("bare", token, nx=True, px=30000)
            compare_and_delete(keys=["bare"], args=[token])

    ours()
    bare()
    return in_turn(lambda: seconds(ours) / PAIRS, lambda: seconds(bare) / PAIRS)


class Worker:
    """A prefork worker that can be held still while its queue is filled."""

    def __init__(self, server: EmbeddedServer, slots: int) -> None:
        from app import app

        self.app = app
        self.url = server.url
        self._client = server.client()
        self._store = open_store(server.url)
        command = [sys.executable, "-m", "celery", "-A", "app", "worker", "--loglevel", "ERROR"]
        command += ["--concurrency", str(slots), "--without-gossip", "--without-mingle"]
        self._process = subprocess.Popen(
            command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def time(self, task: Any, arguments: list[Any], key: str = "one") -> float:
        """Return how long the worker takes for one task for each argument, queued beforehand."""
        self._process.send_signal(signal.SIGSTOP)
        with self.app.producer_or_acquire() as producer:
            for argument in arguments:
                task.apply_async((argument,), producer=producer)
        begin = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        while not self._idle(key):
            if self._process.poll() is not None:
                raise SystemExit(f"the worker ended with status {self._process.returncode}")
            time.sleep(0.01)  # to look costs the worker time, too
        return time.perf_counter() - begin

    def forget_parked(self, key: str) -> None:
        """Throw away what is parked at *key*."""
        self._client.delete(*self._client.keys(f"distlock:{{{key}}}:*"))

    def _idle(self, key: str) -> bool:
        # A message is unacknowledged until its task is in the pool; a parked one is in the store.
        with self._client.pipeline() as pipe:
            waiting, fetched = pipe.llen("celery").hlen("unacked").execute()
        state = self._store.inspect(key)
        return not (waiting or fetched or state.owner or state.waiting)


def noop_tasks(worker: Worker) -> tuple[float, float, float]:
    """Time locked no-op tasks, then plain ones."""
    from app import locked, plain

    numbers = list(range(NOOPS))
    worker.time(plain, numbers[:200])
    worker.time(locked, numbers[:200])
    return in_turn(
        lambda: worker.time(plain, numbers) / NOOPS, lambda: worker.time(locked, numbers) / NOOPS
    )


def main() -> int:
    """Time everything and print the table."""
    table = Table("what", "ours", "the other", "ratio", "goal")
    with EmbeddedServer() as server:
        os.environ["BENCH_URL"] = server.url
        ours, bare, ratio = uncontended(server)
        table.add_row(
            "acquire + release / bare SET NX PX and script",
            f"{ours * 1e6:.0f} µs",
            f"{bare * 1e6:.0f} µs",
            f"{ratio:.2f}",
            "≤ 1.10",
        )
        worker = Worker(server, SLOTS)
        try:
            plain_time, locked_time, throughput = noop_tasks(worker)
            table.add_row(
                "throughput of locked no-op tasks / plain ones",
                f"{1 / locked_time:.0f}/s",
                f"{1 / plain_time:.0f}/s",
                f"{throughput:.2f}",
                "≥ 0.92",
            )
            from app import locked, one_by_one

            took = statistics.median(
                worker.time(one_by_one, [HOLD] * CONTENDED) for _ in range(ROUNDS)
            )
            ideal = CONTENDED * HOLD
            table.add_row(
                f"{CONTENDED} tasks of {HOLD * 1e3:.0f} ms on one key, {SLOTS} slots / ideal",
                f"{took:.2f} s",
                f"{ideal:.2f} s",
                f"{took / ideal:.2f}",
                "",
            )
            alone, beside = others_beside(worker, locked, one_by_one, list(range(NOOPS)))
            table.add_row(
                "throughput beside 10,000 parked tasks / without them",
                f"{NOOPS / beside:.0f}/s",
                f"{NOOPS / alone:.0f}/s",
                f"{alone / beside:.2f}",
                "≥ 0.95",
            )
        finally:
            worker.stop()
        many, few, ratio, each = beside_many(server)
        table.add_row(
            f"hand-over and parking with {MANY:,} parked / with {FEW}",
            f"{many * 1e6:.0f} µs",
            f"{few * 1e6:.0f} µs",
            f"{ratio:.2f}",
            "≤ 1.20",
        )
        table.add_row(
            f"memory of a parked task / its message of {len(ENVELOPE):,} bytes",
            f"{each:,.0f} bytes",
            f"{len(ENVELOPE):,} bytes",
            f"{each / len(ENVELOPE):.2f}",
            "",
        )
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
