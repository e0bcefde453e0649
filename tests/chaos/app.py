"""
The tasks of `make chaos`, and their notes: which task believed to hold which key, and when.

Each note is one line in one file that all processes append to.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery.signals import task_failure

from celery_distlock import Key, LockedTask, Order, clock, install, policies
from celery_distlock.engine.hold import believed
from celery_distlock.errors import LockLostError
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import Ability
from celery_distlock.unique import Unique
from tests.apps import make_app
from tests.chaos.breakages import BREAKAGES
from tests.chaos.terms import LANED, LEASE, MOST, RATE, SHARES, SWEEP, VISIBILITY

app = make_app(
    __name__,
    distlock_lease=LEASE,
    distlock_sweep_interval=SWEEP,
    task_acks_late=True,  # or else a task whose process is killed is gone, with or without locks
    task_reject_on_worker_lost=True,
)
app.conf.broker_transport_options.update(
    visibility_timeout=VISIBILITY,
    unacked_restore_interval=1,
    unacked_restore_throttle=1,
    unacked_mutex_expire=2,
)
install(app)
store = Runtime.of(app).store
PARKS = Ability.QUEUE in store.abilities

AGAIN = policies.Retry(delay=0.2, max_delay=2.0)
WAIT = policies.Wait(timeout=1.0, then="requeue" if PARKS else AGAIN)
ONCE = Unique("started", by="{task}")
NEWEST = Unique("started", duplicate="update")
OFTEN = Key("{key}", shared=True, rate=RATE)
GOES_BACK = {"lock_on_lost": "requeue"} if PARKS else {}


class Notes:
    """The file that all processes append to; a line is one write, so no two mix."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[int, int] = {}

    def write(self, **facts: Any) -> None:
        file = self._files.get(os.getpid())
        if file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            file = self._files[os.getpid()] = os.open(self._path, flags)
        os.write(file, json.dumps(facts).encode() + b"\n")


notes = Notes(os.environ["DISTLOCK_CHAOS_NOTES"])


def hold_for(task: Any, seconds: float) -> None:
    """Hold the keys of *task* for *seconds*, and note from when to when it believed that."""
    holds = task.lock._holds
    facts = {"id": task.request.id, "pid": os.getpid(), "execution": holds[0].owner}
    for hold in holds:
        what = {"key": hold.key, "begin": hold.held_since, "token": hold.token}
        what |= {"units": hold.want.units, "capacity": hold.want.capacity}
        what |= {"until": hold.valid_until, "entered": clock.monotonic()}
        what["asked"] = hold.valid_until - believed(LEASE)  # or later, if it was renewed just now
        what |= {"rated": bool(hold.want.rates), "argument": seconds}
        what |= {"lane": hold.want.lane or "", "most": hold.want.most}
        notes.write(**facts, **what, owner=hold.owner, run=hold.run)
    ended = "broken off"
    try:
        until = clock.monotonic() + seconds
        while clock.monotonic() < until:
            task.lock.ensure_held()
            time.sleep(0.01)
        ended = "done"
    except LockLostError:
        ended = "lost"
        raise
    finally:
        now = clock.monotonic()
        for hold in holds:
            notes.write(owner=hold.owner, end=min(now, hold.valid_until), ended=ended)


if not PARKS:  # a lost lock ends a task there, perhaps before its body has noted anything

    @task_failure.connect(weak=False)
    def note_loss(task_id: str, exception: BaseException, **_: Any) -> None:
        if isinstance(exception, LockLostError):
            notes.write(failed=task_id)


if PARKS:

    @app.task(base=LockedTask, lock_key="{key}", bind=True, **GOES_BACK)
    def requeue(self: Any, key: str, seconds: float) -> None:
        """Park until the key is free."""
        hold_for(self, seconds)

    @app.task(base=LockedTask, lock_key=["{key}", "{other}"], bind=True, **GOES_BACK)
    def pair(self: Any, key: str, other: str, seconds: float) -> None:
        """Park until both keys are free."""
        hold_for(self, seconds)


if PARKS and Ability.SEVERAL in store.abilities:

    @app.task(base=LockedTask, lock_key=Key("{key}", capacity=3), bind=True, **GOES_BACK)
    def three(self: Any, key: str, seconds: float) -> None:
        """Park until one of three units is free."""
        hold_for(self, seconds)

    @app.task(base=LockedTask, lock_key=Key("{key}", shared=True), bind=True, **GOES_BACK)
    def read(self: Any, key: str, seconds: float) -> None:
        """Share the key with any number."""
        hold_for(self, seconds)


if PARKS:
    HEAVY = Key("{key}", capacity=3, weight=2)

    @app.task(base=LockedTask, lock_key=HEAVY, bind=True, **GOES_BACK)
    def heavy(self: Any, key: str, seconds: float) -> None:
        """Park until two of three units are free."""
        hold_for(self, seconds)

    @app.task(base=LockedTask, lock_key=[HEAVY, "{other}"], bind=True, **GOES_BACK)
    def mixed(self: Any, key: str, other: str, seconds: float) -> None:
        """Park until two units of one key are free, and another key is."""
        hold_for(self, seconds)


if PARKS:

    @app.task(base=LockedTask, lock_key="{key}", lock_via="store", bind=True, **GOES_BACK)
    def sent(self: Any, key: str, seconds: float) -> None:
        """Go through the store."""
        hold_for(self, seconds)

    @app.task(base=LockedTask, lock_key="{key}", lock_unique=ONCE, bind=True, **GOES_BACK)
    def once(self: Any, key: str, seconds: float) -> None:
        """Be sent if none waits."""
        hold_for(self, seconds)

    @app.task(base=LockedTask, lock_key="{key}", lock_unique=NEWEST, bind=True, **GOES_BACK)
    def newest(self: Any, key: str, seconds: float) -> None:
        """Have the newest arguments, if one waits."""
        hold_for(self, seconds)


if PARKS:

    @app.task(base=LockedTask, lock_key=OFTEN, bind=True, **GOES_BACK)
    def rated(self: Any, key: str, seconds: float) -> None:
        """Begin as often as the rate allows."""
        hold_for(self, seconds)


if PARKS:

    def in_lanes(key: str, lane: str, seconds: float) -> Key:
        most = MOST if LANED[key] > 1 else None
        return Key(key, capacity=LANED[key], order=Order(lane, share=SHARES[lane], most=most))

    @app.task(base=LockedTask, lock_key=in_lanes, lock_via="store", bind=True, **GOES_BACK)
    def laned(self: Any, key: str, lane: str, seconds: float) -> None:
        """Wait in a lane."""
        hold_for(self, seconds)


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict=AGAIN, bind=True, **GOES_BACK)
def retry(self: Any, key: str, seconds: float) -> None:
    """Come again later."""
    hold_for(self, seconds)


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict=WAIT, bind=True, **GOES_BACK)
def wait(self: Any, key: str, seconds: float) -> None:
    """Block until the key is free."""
    hold_for(self, seconds)


@app.task(bind=True)
def plain(self: Any, key: str, seconds: float) -> None:
    """Do the same without a lock: what Celery alone makes of the faults."""
    begin = clock.monotonic()
    owner = f"plain {os.getpid()} {begin}"
    facts = {"id": self.request.id, "pid": os.getpid(), "execution": owner}
    notes.write(**facts, key="", begin=begin, until=begin + LEASE, token=0, owner=owner, run="")
    time.sleep(seconds)
    notes.write(owner=owner, end=clock.monotonic(), ended="done")


for breakage in filter(None, [os.environ.get("DISTLOCK_CHAOS_BREAK")]):
    BREAKAGES[breakage]()
