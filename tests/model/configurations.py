"""What is explored: by every run of the tests, and by hand."""

from __future__ import annotations

from celery_distlock.rate import Rate
from celery_distlock.stores.values import Completion, Want

from .models import Model, Plan

__all__ = ["ALONE", "ANY_UNIT", "DEEP", "NEWEST", "PACED", "PAIR", "SMALL"]

PAIR = Want(1, 2)  # one of two units
SHARED = Want(1, 0)
RATED = Want(1, 1, (Rate(1, per=2.0),))

ALONE = Plan()
BLOCKED = Plan(how="blocks")
SENT = Plan(how="is sent")
NEWEST = Plan(how="is sent", newest=True)
STORED = Plan(ends=(Completion.UNSETTLED,))  # its result is stored after its end
ANY_UNIT = Plan(want=PAIR)
READER = Plan(want=SHARED)
PACED = Plan(want=RATED)
BOTH = Plan("ab")

SMALL = {
    "alone": Model((ALONE,) * 3),
    "alone, a fault": Model((ALONE,) * 2, faults=1),
    "alone, a fault, and late": Model((ALONE,) * 2, faults=1, delays=1),
    "alone, a second delivery": Model((ALONE,) * 2, copies=1),
    "alone, put back": Model((ALONE,) * 2, faults=1, acts=frozenset(["put back"])),
    "stored later, a second delivery": Model((STORED,), faults=1, copies=1),
    "blocked, a fault": Model((BLOCKED,) * 3, faults=1),
    "pushed, a fault": Model((ALONE,) * 2, faults=1, pushes=True),
    "sent, a fault": Model((SENT,) * 2, faults=1),
    "sent, parked and blocked": Model((SENT, ALONE, BLOCKED)),
    "newest, a fault": Model((NEWEST,) * 2, faults=1),
    "newest, a second delivery": Model((NEWEST,) * 2, copies=1),
    "newest of three": Model((NEWEST,) * 3),
    "paused": Model((ALONE,) * 2, acts=frozenset(["pause"])),
    "paused for a time": Model((ALONE,) * 2, acts=frozenset(["pause for 3 s"]), ticks=True),
    "cancelled": Model((ALONE,) * 3, acts=frozenset(["cancel"])),
    "taken away": Model((ALONE, BLOCKED), acts=frozenset(["release"])),
    "two units": Model((ANY_UNIT,) * 3),
    "two units, one gives up": Model(
        (ANY_UNIT, Plan(want=PAIR, how="blocks"), BLOCKED), acts=frozenset(["leave"])
    ),
    "two units, limited": Model((ANY_UNIT,) * 2, acts=frozenset(["limit to 1"])),
    "two units, a fault": Model((ANY_UNIT,) * 2, faults=1),
    "shared": Model((ALONE, READER, READER)),
    "shared, a fault": Model((ALONE, READER), faults=1),
    "one in 2 s, no sweeps": Model((PACED,) * 2, sweeps=False, ticks=True, memory=3.0),
    "one in 2 s, blocked": Model(
        (Plan(want=RATED, how="blocks"),) * 2, sweeps=False, ticks=True, memory=3.0
    ),
    "two keys": Model((BOTH,) * 2, faults=1),
    "two keys, and each": Model((BOTH, Plan("a"), Plan("b"))),
}

DEEP = {
    "alone, a fault": Model((ALONE,) * 3, faults=1),
    "alone, two faults": Model((ALONE,) * 2, faults=2),
    "alone, all": Model(
        (ALONE,) * 2, faults=1, copies=1, delays=1, pushes=True, acts=frozenset(["put back"])
    ),
    "second deliveries": Model((ALONE,) * 2, faults=1, copies=2),
    "stored later": Model((STORED,) * 2, faults=1, copies=1),
    "blocked, two faults": Model((BLOCKED,) * 3, faults=2),
    "sent, parked and blocked": Model((SENT, ALONE, BLOCKED), faults=1),
    "newest, all": Model((NEWEST,) * 2, faults=1, copies=1, delays=1, pushes=True),
    "newest of three": Model((NEWEST,) * 3, faults=1),
    "operators": Model(
        (ALONE, BLOCKED),
        acts=frozenset(["pause", "limit to 1", "cancel", "release", "leave"]),
        ticks=True,
    ),
    "two units": Model((ANY_UNIT,) * 3, faults=1),
    "two units, operators": Model(
        (ANY_UNIT,) * 3, acts=frozenset(["pause", "limit to 1", "cancel", "release"]), ticks=True
    ),
    "shared": Model((ALONE, READER, READER), faults=1),
    "one in 2 s": Model((PACED,) * 2, faults=1, ticks=True, memory=3.0),
    "two keys, and each": Model((BOTH, Plan("a"), Plan("b")), faults=1),
    "two keys, thrice": Model((BOTH,) * 3, faults=1),
}
