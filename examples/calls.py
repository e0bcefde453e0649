"""What `at_once.py` and `flood.py` share: their workers, and when each call of a tenant ran."""

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass

from celery import Celery
from stage import make_database, open_database, wait_until, workers

from celery_distlock import install

WORKERS, PROCESSES = ("north", "south"), 4

SCHEMA = """
DROP TABLE IF EXISTS calls;
CREATE TABLE calls (queue TEXT, tenant TEXT, began_at REAL, ended_at REAL);
"""


@dataclass(frozen=True)
class Call:
    queue: str
    tenant: str
    began_at: float
    ended_at: float


def make_app(name: str) -> Celery:
    app = Celery(name)
    app.conf.worker_prefetch_multiplier = 1  # the next task goes to a process that is free
    install(app)
    return app


@contextmanager
def at_work(app: Celery, folder):
    """Have workers that are ready, and yield the database of their calls."""
    with (
        closing(make_database(SCHEMA)) as db,
        workers(app.main, WORKERS, folder, processes=PROCESSES),
    ):
        count = len(WORKERS)
        wait_until(lambda: len(app.control.ping(timeout=0.5, limit=count)) == count, "workers")
        yield db


def call(queue: str, tenant: str, seconds: float) -> None:
    """Take *seconds*, and note when that was."""
    began_at = time.monotonic()
    time.sleep(seconds)
    with closing(open_database()) as db:
        done = (queue, tenant, began_at, time.monotonic())
        db.execute("INSERT INTO calls VALUES (?, ?, ?, ?)", done)


def send(counts: dict[str, int], *tasks) -> None:
    """Call *tasks* for one tenant after the other, as often as *counts* says."""
    for tenant, count in counts.items():
        for _ in range(count):
            for task in tasks:
                task.delay(tenant)


def wait_for(db, count: int) -> list[Call]:
    """Return this many calls, when they are done, in the order of their starts."""
    query = "SELECT * FROM calls ORDER BY began_at"
    wait_until(lambda: len(db.execute(query).fetchall()) == count, "the end of all calls")
    return [Call(*row) for row in db.execute(query)]


def in_words(counts: dict[str, int]) -> str:
    return ", then ".join(f"{tenant} {count}" for tenant, count in counts.items())
