"""Celery workers with a stopwatch."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from cpu_time import children, cpu_of

from celery_distlock.stores import open_store
from celery_distlock.testing import EmbeddedServer, die_with_parent

HERE = Path(__file__).parent
UNWANTED = "unwanted"  # a key that no task wants


class Times(NamedTuple):
    """Seconds."""

    sending: float
    running: float


class Worker:
    """A prefork worker that can be held still while its queue is filled."""

    def __init__(self, server: EmbeddedServer, slots: int, queue: str = "celery") -> None:
        from app import FINISHED, RUNS, app

        self.app = app
        self.url = server.url
        self._queue = queue
        self._finished, self._runs = FINISHED, RUNS
        self.client = server.client()
        self._store = open_store(server.url)
        command = [sys.executable, "-m", "celery", "-A", "app", "worker", "--loglevel", "ERROR"]
        command += ["--concurrency", str(slots), "--queues", queue]
        command += ["--without-gossip", "--without-mingle"]
        self._process = subprocess.Popen(
            die_with_parent(command, signal.SIGTERM),
            cwd=HERE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()

    def time(self, task: Any, calls: Sequence[tuple[Any, ...]], key: str = UNWANTED) -> Times:
        """Time *calls*, until their queue is empty and *key* has neither holder nor waiter."""
        return self._time(task, calls, lambda: self._idle(key))

    def time_counted(self, task: Any, calls: Sequence[tuple[Any, ...]]) -> tuple[float, float]:
        """Time *calls* until the task has counted them; return seconds, and runs for each."""
        self.client.delete(self._finished, self._runs)
        times = self._time(task, calls, lambda: self._count(self._finished) >= len(calls))
        return times.running, self._count(self._runs) / len(calls)

    def cpu(self) -> tuple[float, float]:
        """Return the CPU seconds of its main process, and of its pool's; on Linux."""
        main, pool = self._process.pid, children(self._process.pid)
        while len(pool) == 1:  # what was started looks after what it has started
            main, pool = pool[0], children(pool[0])
        return cpu_of(main), sum(map(cpu_of, pool))

    def forget_parked(self, key: str) -> None:
        """Throw away what is parked at *key*."""
        self.client.delete(*self.client.keys(f"distlock:{{{key}}}:*"))

    def _time(self, task: Any, calls: Sequence[tuple[Any, ...]], done: Callable[[], bool]) -> Times:
        self._process.send_signal(signal.SIGSTOP)
        sent = time.perf_counter()
        with self.app.producer_or_acquire() as producer:
            for call in calls:
                task.apply_async(call, producer=producer, queue=self._queue)
        begin = time.perf_counter()
        self._process.send_signal(signal.SIGCONT)
        while not done():
            if self._process.poll() is not None:
                raise SystemExit(f"the worker ended with status {self._process.returncode}")
            time.sleep(0.01)  # to look costs the worker time, too
        return Times(begin - sent, time.perf_counter() - begin)

    def _idle(self, key: str) -> bool:
        # A message is unacknowledged until its task is in the pool; a parked one is in the store.
        with self.client.pipeline() as pipe:
            waiting, fetched = pipe.llen(self._queue).hlen("unacked").execute()
        state = self._store.inspect(key)
        return not (waiting or fetched or state.owner or state.waiting)

    def _count(self, name: str) -> int:
        return int(self.client.get(name) or 0)
