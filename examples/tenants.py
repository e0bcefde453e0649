"""
A rate of one per tenant: the imports of each tenant run one at a time and in
the order they came, those of different tenants side by side.

    python examples/tenants.py

The exit status is 1 if that was not so.
"""

import sys
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass

from celery import Celery
from stage import make_database, open_database, perform, show, wait_until, workers

from celery_distlock import Lock, LockedTask, install

TENANTS = ("acme", "bolt", "cobalt", "dune", "elm", "fjord")
IMPORTS = 5  # of each tenant
SECONDS = 0.1  # that an import takes
WORKERS, PROCESSES = ("north", "south"), 3

SCHEMA = "CREATE TABLE runs (tenant TEXT, number INTEGER, began_at REAL, ended_at REAL)"

app = Celery("tenants")
app.conf.worker_prefetch_multiplier = 1  # a free one takes the next
install(app)


@app.task(base=LockedTask, lock_key="tenant:{tenant}")
def run_import(tenant: str, number: int) -> None:
    began_at = time.monotonic()
    time.sleep(SECONDS)
    with closing(open_database()) as db:
        run = (tenant, number, began_at, time.monotonic())
        db.execute("INSERT INTO runs VALUES (?, ?, ?, ?)", run)


@dataclass(frozen=True)
class Run:
    tenant: str
    number: int
    began_at: float
    ended_at: float


def story(folder) -> bool:
    total = len(TENANTS) * IMPORTS
    with (
        closing(make_database(SCHEMA)) as db,
        workers("tenants", WORKERS, folder, processes=PROCESSES),
    ):
        with ExitStack() as maintenance:
            for tenant in TENANTS:
                maintenance.enter_context(Lock(f"tenant:{tenant}"))
            send_imports()
            show(f"{len(TENANTS)} tenants are locked: {total} imports are parked.")
            show(f"That of a new tenant, sent last, was done after {time_newcomer(db):.2f} s.")
        wait_until(lambda: len(runs(db)) == total + 1, "the end of all imports")
        return report([run for run in runs(db) if run.tenant in TENANTS])


def send_imports() -> None:
    """Send every import when the one before it is in its tenant's queue."""
    for number in range(1, IMPORTS + 1):
        for tenant in TENANTS:
            task_id = run_import.delay(tenant, number).id
            wait_until(lambda: is_parked(task_id), "an import to be parked")  # noqa: B023  # at once


def is_parked(task_id: str) -> bool:
    return app.AsyncResult(task_id).state == "PARKED"


def time_newcomer(db) -> float:
    """Return the seconds that an import takes whose tenant is not locked."""
    sent_at = time.monotonic()
    run_import.delay("newcomer", 1)
    (run,) = wait_until(lambda: runs(db), "the newcomer's import")
    return run.ended_at - sent_at


def runs(db) -> list[Run]:
    """Return the imports that were done, in the order in which they began."""
    return [Run(*row) for row in db.execute("SELECT * FROM runs ORDER BY began_at")]


def report(done: list[Run]) -> bool:
    seconds = max(run.ended_at for run in done) - min(run.began_at for run in done)
    work = sum(run.ended_at - run.began_at for run in done)
    show(f"Unlocked, they were done in {seconds:.1f} s, which is {work:.1f} s of work.\n")
    show(f"{'tenant':<8} {'imports in order':<17} at once")
    ordered, apart = True, True
    for tenant in TENANTS:
        own = [run for run in done if run.tenant == tenant]
        numbers = [run.number for run in own]
        ordered = ordered and numbers == list(range(1, IMPORTS + 1))
        apart = apart and at_once(own) == 1
        show(f"{tenant:<8} {' '.join(map(str, numbers)):<17} {at_once(own):>7}")
    show(f"{'all':<8} {'':<17} {at_once(done):>7}\n")
    show(f"one at a time for each tenant: {'yes' if apart else 'NO'}")
    show(f"in the order they came: {'yes' if ordered else 'NO'}")
    show(f"tenants side by side: {'yes' if at_once(done) > 1 else 'NO'}")
    return apart and ordered and at_once(done) > 1


def at_once(done: list[Run]) -> int:
    """Return how many of these runs were under way at one moment, at most."""
    return max(
        sum(other.began_at <= run.began_at < other.ended_at for other in done) for run in done
    )


if __name__ == "__main__":
    sys.exit(perform(story))
