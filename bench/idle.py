"""What workers without tasks ask of the store, and a model of many more of them."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from figures import Figure, Part, Row
from many import Work

from celery_distlock.testing import EmbeddedServer, die_with_parent

HERE = Path(__file__).parent
WORKERS = 10, 100  # a hundred need 12 GB of memory
MANY = 2_000
SLOTS = 2  # of each worker; both have run a locked task
SECONDS = 30.0
LIMIT = 600.0  # seconds until all workers have run something
SPARE = 1.25  # times the connections, for reconnections and operators


def idle(_server: EmbeddedServer, scale: float) -> Iterator[Part]:
    sizes = [max(1, round(size * scale)) for size in WORKERS]
    sizes[1] = max(sizes[1], sizes[0] + 1)
    measured = [_measured(size, SECONDS * max(scale, 0.05)) for size in sizes]
    rows = [_row(f"{size} workers", *each) for size, each in zip(sizes, measured, strict=True)]
    # Linear in the workers, and a constant: one of them sweeps, one is the ticker.
    model = [
        one + (other - one) / (sizes[1] - sizes[0]) * (MANY - sizes[0])
        for one, other in zip(*measured, strict=True)
    ]
    most = f"{MANY:,} such workers by extrapolation: maxclients {model[-1] * SPARE:,.0f} at least"
    yield Part(
        "idle",
        f"Workers with {SLOTS} slots and nothing to do",
        "scripts a second",
        ["commands a second", "share of a core of the server", "connections"],
        [*rows, _row(f"{MANY:,} workers, extrapolated", *model)],
        [most],
    )


def _row(name: str, scripts: float, commands: float, cpu: float, connections: float) -> Row:
    figures = Figure(commands, "", 1), Figure(cpu, "", 4), Figure(connections, "", 0)
    return Row(name, Figure(scripts, "", 1), figures)


def _measured(size: int, seconds: float) -> tuple[float, ...]:
    """Return scripts, commands and CPU seconds a second, and connections, of *size* workers."""
    with EmbeddedServer() as broker, EmbeddedServer() as store, ExitStack() as crew:
        os.environ |= {"BENCH_URL": broker.url, "BENCH_STORE": store.url}
        for number in range(size):
            crew.enter_context(_worker(f"idle{number}"))
        _occupy(broker, [f"idle{number}" for number in range(size)])
        with store.client(socket_timeout=None) as client:
            time.sleep(seconds / 3)  # what was noted of those tasks is written
            before, begin = Work.of(client), time.perf_counter()
            time.sleep(seconds)
            work, took = Work.of(client).since(before), time.perf_counter() - begin
            connections = client.info("clients")["connected_clients"] - 1
    return work.scripts / took, work.commands / took, work.cpu / took, float(connections)


def _occupy(broker: EmbeddedServer, queues: list[str]) -> None:
    """Have each slot of each worker run a locked task."""
    sys.modules.pop("returns_app", None)
    app = importlib.import_module("returns_app")
    for queue in queues:
        for slot in range(SLOTS):
            app.work.apply_async((f"{queue}:{slot}", 1.0, 0.0), queue=queue)
    deadline = time.monotonic() + LIMIT
    with broker.client(socket_timeout=None) as client:
        while client.llen(app.RAN) < len(queues) * SLOTS:
            if time.monotonic() > deadline:
                raise SystemExit("the workers have not begun in time")
            time.sleep(0.2)
    app.app.close()


@contextmanager
def _worker(queue: str) -> Iterator[Any]:
    command = [sys.executable, "-m", "celery", "-A", "returns_app", "worker", "-Q", queue]
    command += ["-c", str(SLOTS), "-n", f"{queue}@%h", "--loglevel", "ERROR"]
    command += ["--without-gossip", "--without-mingle"]
    null = subprocess.DEVNULL
    worker = subprocess.Popen(
        die_with_parent(command, signal.SIGTERM), cwd=HERE, stdout=null, stderr=null
    )
    try:
        yield worker
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.wait()
