"""
Five at a time for each tenant: what one tenant has too much of waits, and
those of another go on.

    python examples/at_once.py

The exit status is 1 if that was not so. It is an act of the demo, too.
"""

import sys

from calls import PROCESSES, WORKERS, Call, at_work, call, in_words, make_app, send, wait_for
from stage import perform, show

from celery_distlock import Key, LockedTask

AT_ONCE = 5  # for each tenant
SECONDS = 0.4  # that a call takes
CALLS = {"acme": 25, "bolt": 8}  # sent in this order
COLUMNS = 48

app = make_app("at_once")


@app.task(base=LockedTask, lock_key=Key("api:{tenant}", capacity=AT_ONCE), ignore_result=True)
def call_api(tenant: str) -> None:
    call("api", tenant, SECONDS)


def story(folder) -> bool:
    with at_work(app, folder) as db:
        show(
            f"At most {AT_ONCE} calls at a time for each tenant,"
            f" {len(WORKERS) * PROCESSES} processes. Sent: {in_words(CALLS)}."
        )
        send(CALLS, call_api)
        return report(wait_for(db, sum(CALLS.values())))


def report(done: list[Call]) -> bool:
    """Report how many calls of each tenant were under way, from the first to the last moment."""
    begin, end = min(call.began_at for call in done), max(call.ended_at for call in done)
    moments = [begin + (end - begin) * (column + 0.5) / COLUMNS for column in range(COLUMNS)]
    own = {tenant: [call for call in done if call.tenant == tenant] for tenant in CALLS}
    show()
    for tenant, theirs in own.items():
        counts = "".join(str(under_way(theirs, moment) or ".") for moment in moments)
        show(f"{tenant:<6} {counts}")
    show(f"{'':<6} {'0 s':<{COLUMNS - 5}}{end - begin:>3.1f} s\n")
    never = all(at_once(theirs) <= AT_ONCE for theirs in own.values())
    meanwhile = any(under_way(own["acme"], call.began_at) for call in own["bolt"])
    show(f"never a sixth call of one tenant: {'yes' if never else 'NO'}")
    show(f"the other tenant's go on meanwhile: {'yes' if meanwhile else 'NO'}")
    return never and meanwhile


def under_way(done: list[Call], moment: float) -> int:
    return sum(call.began_at <= moment < call.ended_at for call in done)


def at_once(done: list[Call]) -> int:
    """Return how many of these calls were under way at one moment, at most."""
    return max(under_way(done, call.began_at) for call in done)


if __name__ == "__main__":
    sys.exit(perform(story))
