"""Tasks of an app that reads its settings from the environment, as a JSON object."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery_distlock import Lock, LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__)
app.conf.update(json.loads(os.environ.get("DISTLOCK_TEST_CONF", "{}")))
install(app)
journal = Journal.of_environment()

OPTIONS: dict[str, Any] = json.loads(os.environ.get("DISTLOCK_TEST_OPTIONS", "{}"))


@app.task(shared=False)
def add(x: int, y: int) -> int:
    return x + y


@app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False, **OPTIONS)
def look(self: Any, key: str, gate: str = "") -> float | None:
    """Return the lease that this runs with, or None if it runs unlocked."""
    journal.write(key, None)
    if gate:
        journal.pass_gate(gate)
    return self.lock.remaining if self.lock and Lock(key).locked() else None


@app.task(base=LockedTask, lock_key="{key}", shared=False)
def nap(key: str, seconds: float) -> None:
    time.sleep(seconds)


@app.task(base=LockedTask, bind=True, lock_key="{key}", lock_lease=300.0, shared=False)
def look_with_own_lease(self: Any, key: str) -> float:
    return self.lock.remaining


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="fail", shared=False)
def fail_on_conflict(key: str) -> str:
    return "ran"


@app.task(base=LockedTask, lock_key="{key}", lock_on_outage="fail", shared=False)
def fail_on_outage(key: str) -> str:
    return "ran"


@app.task(base=LockedTask, bind=True, lock_key="{key}", lock_on_outage="run", shared=False)
def run_on_outage(self: Any, key: str) -> bool:
    """Return whether there is a lock."""
    journal.write(f"{key}:locked", bool(self.lock))
    return bool(self.lock)


@app.task(name="forgotten", lock_key="{key}", shared=False)
def forgotten(key: str) -> None:
    """One where ``base=LockedTask`` is missing."""
