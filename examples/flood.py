"""
A flood of one tenant, and then a few calls of another: how long each waits,
by arrival and in lanes.

    python examples/flood.py

The exit status is 1 if the small tenant waited for the flood in its lane, too.
It is the last act of the demo.
"""

import sys
import time

from calls import Call, at_work, call, in_words, make_app, send, wait_for
from stage import perform, show

from celery_distlock import Key, Lock, LockedTask, Order

AT_ONCE = 4  # for all tenants
SECONDS = 0.05  # that a call takes
CALLS = {"acme": 120, "bolt": 5}  # sent in this order
FAIR = 2 * CALLS["bolt"] + 2 * AT_ONCE  # starts until the last call of bolt

app = make_app("flood")


@app.task(
    base=LockedTask,
    lock_key=Key("by arrival", capacity=AT_ONCE),
    lock_via="store",
    ignore_result=True,
)
def call_by_arrival(tenant: str) -> None:
    call("by arrival", tenant, SECONDS)


@app.task(
    base=LockedTask,
    lock_key=Key("in lanes", capacity=AT_ONCE, order=Order("{tenant}")),
    ignore_result=True,
)
def call_in_lanes(tenant: str) -> None:
    call("in lanes", tenant, SECONDS)


def story(folder) -> bool:
    with at_work(app, folder) as db:
        with Lock("by arrival"), Lock("in lanes"):
            send(CALLS, call_by_arrival, call_in_lanes)
            show(
                f"At most {AT_ONCE} calls at a time for all tenants."
                f" Sent to each queue: {in_words(CALLS)}."
            )
            freed_at = time.monotonic()
        return report(wait_for(db, 2 * sum(CALLS.values())), freed_at)


def report(done: list[Call], freed_at: float) -> bool:
    """Report how long each tenant's last call waited, in each queue."""
    show(f"\n{'the last one waited':<20}" + "".join(f"{tenant:>9}" for tenant in CALLS))
    for queue in ("by arrival", "in lanes"):
        last = {each.tenant: each.began_at - freed_at for each in done if each.queue == queue}
        show(f"{queue:<20}" + "".join(f"{last[tenant]:>7.2f} s" for tenant in CALLS))
    first = [each.tenant for each in done if each.queue == "in lanes"][:FAIR]
    fair = first.count("bolt") == CALLS["bolt"]
    show(f"\nin its lane, the small tenant does not wait for the flood: {'yes' if fair else 'NO'}")
    return fair


if __name__ == "__main__":
    sys.exit(perform(story))
