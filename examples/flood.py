"""
A flood of one tenant, and then a few calls of another: how long each waits,
by arrival and in lanes.

    python examples/flood.py

The exit status is 1 if the small tenant waited for the flood in its lane, too.
It is the last act of the demo.
"""

import sys
import time
from contextlib import closing
from dataclasses import dataclass

from celery import Celery
from stage import make_database, open_database, perform, tell, wait_until, workers

from celery_distlock import Key, Lock, LockedTask, Order, install

AT_ONCE = 4  # for all tenants
SECONDS = 0.05  # that a call takes
CALLS = {"acme": 120, "bolt": 5}  # sent in this order
FAIR = 2 * CALLS["bolt"] + 2 * AT_ONCE  # starts until the last call of bolt
WORKERS, PROCESSES = ("north", "south"), 4

SCHEMA = "CREATE TABLE starts (queue TEXT, tenant TEXT, began_at REAL)"

app = Celery("flood")
app.conf.worker_prefetch_multiplier = 1  # whoever is free takes the next
install(app)


@app.task(
    base=LockedTask,
    lock_key=Key("by arrival", capacity=AT_ONCE),
    lock_via="store",
    ignore_result=True,
)
def call_by_arrival(tenant: str) -> None:
    call("by arrival", tenant)


@app.task(
    base=LockedTask,
    lock_key=Key("in lanes", capacity=AT_ONCE, order=Order("{tenant}")),
    ignore_result=True,
)
def call_in_lanes(tenant: str) -> None:
    call("in lanes", tenant)


def call(queue: str, tenant: str) -> None:
    began_at = time.monotonic()
    time.sleep(SECONDS)
    with closing(open_database()) as db:
        db.execute("INSERT INTO starts VALUES (?, ?, ?)", (queue, tenant, began_at))


@dataclass(frozen=True)
class Start:
    queue: str
    tenant: str
    began_at: float


def story(folder) -> bool:
    sent = ", then ".join(f"{tenant} {count}" for tenant, count in CALLS.items())
    with (
        closing(make_database(SCHEMA)) as db,
        workers("flood", WORKERS, folder, processes=PROCESSES),
    ):
        with Lock("by arrival"), Lock("in lanes"):
            for tenant in (tenant for tenant, count in CALLS.items() for _ in range(count)):
                call_by_arrival.delay(tenant)
                call_in_lanes.delay(tenant)
            count = len(WORKERS)
            wait_until(lambda: len(app.control.ping(timeout=0.5, limit=count)) == count, "workers")
            tell(f"At most {AT_ONCE} calls at a time for all tenants. Sent to each queue: {sent}.")
            freed_at = time.monotonic()
        wait_until(lambda: len(starts(db)) == 2 * sum(CALLS.values()), "the end of all calls")
        return report(starts(db), freed_at)


def starts(db) -> list[Start]:
    return [Start(*row) for row in db.execute("SELECT * FROM starts ORDER BY began_at")]


def report(done: list[Start], freed_at: float) -> bool:
    """Tell how long each tenant's last call waited, in each queue."""
    tell(f"\n{'the last one waited':<20}" + "".join(f"{tenant:>9}" for tenant in CALLS))
    for queue in ("by arrival", "in lanes"):
        last = {start.tenant: start.began_at - freed_at for start in done if start.queue == queue}
        tell(f"{queue:<20}" + "".join(f"{last[tenant]:>7.2f} s" for tenant in CALLS))
    first = [start.tenant for start in done if start.queue == "in lanes"][:FAIR]
    fair = first.count("bolt") == CALLS["bolt"]
    tell(f"\nin its lane, the small tenant does not wait for the flood: {'yes' if fair else 'NO'}")
    return fair


if __name__ == "__main__":
    sys.exit(perform(story))
