"""
Five at a time for each tenant: what one tenant has too much of waits, and
those of another go on.

    python examples/at_once.py

The exit status is 1 if that was not so. It is an act of the demo, too.
"""

import sys
import time
from contextlib import closing
from dataclasses import dataclass

from celery import Celery
from stage import make_database, open_database, perform, tell, wait_until, workers

from celery_distlock import Key, LockedTask, install

AT_ONCE = 5  # for each tenant
SECONDS = 0.4  # that a call takes
CALLS = {"acme": 25, "bolt": 8}  # sent in this order
WORKERS, PROCESSES = ("north", "south"), 4
COLUMNS = 48

SCHEMA = "CREATE TABLE calls (tenant TEXT, began_at REAL, ended_at REAL)"

app = Celery("at_once")
app.conf.worker_prefetch_multiplier = 1  # whoever is free takes the next
install(app)


@app.task(base=LockedTask, lock_key=Key("api:{tenant}", capacity=AT_ONCE), ignore_result=True)
def call_api(tenant: str) -> None:
    began_at = time.monotonic()
    time.sleep(SECONDS)
    with closing(open_database()) as db:
        db.execute("INSERT INTO calls VALUES (?, ?, ?)", (tenant, began_at, time.monotonic()))


@dataclass(frozen=True)
class Call:
    tenant: str
    began_at: float
    ended_at: float


def story(folder) -> bool:
    sent = ", then ".join(f"{tenant} {count}" for tenant, count in CALLS.items())
    with (
        closing(make_database(SCHEMA)) as db,
        workers("at_once", WORKERS, folder, processes=PROCESSES),
    ):
        wait_until(lambda: len(app.control.ping(timeout=0.5)) == len(WORKERS), "the workers")
        tell(
            f"At most {AT_ONCE} calls at a time for each tenant,"
            f" {len(WORKERS) * PROCESSES} processes. Sent: {sent}."
        )
        for tenant, count in CALLS.items():
            for _ in range(count):
                call_api.delay(tenant)
        wait_until(lambda: len(calls(db)) == sum(CALLS.values()), "the end of all calls")
        return report(calls(db))


def calls(db) -> list[Call]:
    return [Call(*row) for row in db.execute("SELECT * FROM calls ORDER BY began_at")]


def report(done: list[Call]) -> bool:
    """Tell how many calls of each tenant were under way, from the first to the last moment."""
    begin, end = min(call.began_at for call in done), max(call.ended_at for call in done)
    moments = [begin + (end - begin) * (column + 0.5) / COLUMNS for column in range(COLUMNS)]
    own = {tenant: [call for call in done if call.tenant == tenant] for tenant in CALLS}
    tell()
    for tenant, theirs in own.items():
        counts = "".join(str(under_way(theirs, moment) or ".") for moment in moments)
        tell(f"{tenant:<6} {counts}")
    tell(f"{'':<6} {'0 s':<{COLUMNS - 5}}{end - begin:>3.1f} s\n")
    never = all(at_once(theirs) <= AT_ONCE for theirs in own.values())
    beside = any(under_way(own["acme"], call.began_at) for call in own["bolt"])
    tell(f"never a sixth call of one tenant: {'yes' if never else 'NO'}")
    tell(f"the other tenant's go on meanwhile: {'yes' if beside else 'NO'}")
    return never and beside


def under_way(done: list[Call], moment: float) -> int:
    return sum(call.began_at <= moment < call.ended_at for call in done)


def at_once(done: list[Call]) -> int:
    """Return how many of these calls were under way at one moment, at most."""
    return max(under_way(done, call.began_at) for call in done)


if __name__ == "__main__":
    sys.exit(perform(story))
