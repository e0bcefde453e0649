"""
A long import loses its lock, twice: an operator deletes it, and a worker is
suspended for longer than its lease. Another run goes on where the first one stopped.

    python examples/long_import.py

Where a run that has lost its lock is not aborted, the table refuses its write by
the fencing token. The exit status is 1 if a row was imported twice, or never.
"""

import os
import signal
import sys
import time
from contextlib import closing, contextmanager

from celery import Celery
from redis import Redis
from stage import make_database, open_database, perform, show, wait_until, workers

from celery_distlock import LockedTask, install

ROWS = 60  # of each import
SECONDS = 0.05  # to fetch a row
LEASE = 3.0  # seconds

SCHEMA = """
CREATE TABLE imports (name TEXT PRIMARY KEY, row INTEGER, token INTEGER);
CREATE TABLE rows (name TEXT, row INTEGER, token INTEGER);
CREATE TABLE refusals (name TEXT, row INTEGER, token INTEGER, highest INTEGER);
INSERT INTO imports VALUES ('prices', 0, 0), ('stock', 0, 0);
"""

app = Celery("long_import")
install(app)


class StaleWriterError(Exception):
    """A holder with a later token has written."""


@app.task(base=LockedTask, bind=True, lock_key="import:{name}", lock_lease=LEASE)
def load(self, name: str) -> None:
    import_rows(name, self.lock.token)


@app.task(
    base=LockedTask, bind=True, lock_key="import:{name}", lock_lease=LEASE, lock_on_lost="warn"
)
def load_unaborted(self, name: str) -> None:
    """Run on without the lock, as what cannot be interrupted does."""
    import_rows(name, self.lock.token)


def import_rows(name: str, token: int) -> None:
    """Go on after the last row that was imported, by any run."""
    with closing(open_database()) as db:
        for row in range(last_row(db, name) + 1, ROWS + 1):
            time.sleep(SECONDS)
            write(db, name, row, token)


def last_row(db, name: str) -> int:
    return db.execute("SELECT row FROM imports WHERE name = ?", (name,)).fetchone()[0]


def write(db, name: str, row: int, token: int) -> None:
    """Write one row, unless a later token has been here."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        accepted = db.execute(
            "UPDATE imports SET row = ?, token = ? WHERE name = ? AND token <= ?",
            (row, token, name, token),
        ).rowcount
        if accepted:
            db.execute("INSERT INTO rows VALUES (?, ?, ?)", (name, row, token))
        else:
            db.execute(
                "INSERT INTO refusals SELECT name, ?, ?, token FROM imports WHERE name = ?",
                (row, token, name),
            )
    if not accepted:
        raise StaleWriterError(f"row {row} of {name} came with token {token}")


def story(folder) -> bool:
    with (
        closing(make_database(SCHEMA)) as db,
        workers("long_import", ("east", "west"), folder, processes=1) as started,
    ):
        right = [lock_is_deleted(db), worker_stands_still(db, started["east"])]
    return all(right)


def lock_is_deleted(db) -> bool:
    show("1. An operator deletes the lock of a running import.")
    first = start(load, "prices", "east")
    wait_until(lambda: last_row(db, "prices") >= 10, "ten rows")
    with Redis.from_url(os.environ["CELERY_BROKER_URL"]) as redis:
        redis.delete("distlock:{import:prices}:lock")
    wait_until(lambda: state(first) == "FAILURE", "the end of the first run")
    error = app.AsyncResult(first).result
    show(f"   east was aborted after row {last_row(db, 'prices')}:")
    show(f"   {type(error).__name__}: {error}")
    second = start(load, "prices", "west")
    wait_until(lambda: state(second) == "SUCCESS", "the end of the second run")
    return is_whole(db, "prices") and type(error).__name__ == "LockLostError"


def worker_stands_still(db, east) -> bool:
    show("2. A worker stands still for longer than its lease, and is not aborted.")
    first = start(load_unaborted, "stock", "east")
    wait_until(lambda: last_row(db, "stock") >= 10, "ten rows")
    with stopped_between_writes(db, east):
        reached = last_row(db, "stock")
        show(f"   east stands still at row {reached}; its lease of {LEASE:g} s runs out")
        second = start(load_unaborted, "stock", "west")
        wait_until(lambda: last_row(db, "stock") > reached, "the second run")
    show(f"   west went on at row {reached + 1}, and east wakes up")
    wait_until(lambda: state(first) == "FAILURE", "the end of the first run")
    wait_until(lambda: state(second) == "SUCCESS", "the end of the second run")
    refusals = db.execute("SELECT row, token, highest FROM refusals").fetchall()
    for row, token, highest in refusals:
        show(f"   the table refused row {row} from east: token {token} after {highest}")
    return is_whole(db, "stock") and len(refusals) == 1


def start(task, name: str, worker: str) -> str:
    """Start *task* on that worker; return the task's id."""
    return task.apply_async((name,), queue=worker).id


def state(task_id: str) -> str:
    return app.AsyncResult(task_id).state


@contextmanager
def stopped_between_writes(db, worker):
    """Stop all processes of *worker*, none of them in the middle of a write."""
    db.execute("BEGIN IMMEDIATE")
    os.killpg(worker.pid, signal.SIGSTOP)
    time.sleep(0.1)  # until the last of them is stopped
    db.execute("ROLLBACK")
    try:
        yield
    finally:
        os.killpg(worker.pid, signal.SIGCONT)


def is_whole(db, name: str) -> bool:
    """Report the imports; return whether each row was imported once, in order, by two runs."""
    rows = db.execute("SELECT row, token FROM rows WHERE name = ? ORDER BY rowid", (name,))
    numbers, tokens = zip(*rows, strict=True)
    for token in sorted(set(tokens)):
        own = [number for number, other in zip(numbers, tokens, strict=True) if other == token]
        show(f"   token {token}: rows {own[0]} to {own[-1]}")
    whole = numbers == tuple(range(1, ROWS + 1)) and tokens == tuple(sorted(tokens))
    show(f"   each of the {ROWS} rows was imported once, in order: {'yes' if whole else 'NO'}")
    return whole and len(set(tokens)) == 2


if __name__ == "__main__":
    sys.exit(perform(story))
