"""Tasks of a worker whose neighbours hang; its journal is where ``DISTLOCK_TEST_JOURNAL`` says."""

from __future__ import annotations

import os
from typing import Any

from celery_distlock import LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__, distlock_sweep_interval=0.5)
install(app)
journal = Journal(os.environ["DISTLOCK_TEST_JOURNAL"], os.environ["DISTLOCK_TEST_PREFIX"])


@app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False)
def work(self: Any, key: str, note: Any = None, gate: str = "", freight: str = "") -> Any:
    """Write *note* down, and wait at the gate."""
    journal.write(key, note)
    if gate:
        journal.pass_gate(gate)
    return note


@app.task(base=LockedTask, lock_key="{key}", lock_on_conflict="skip", shared=False)
def skip(key: str) -> str:
    return "ran"


@app.task(ignore_result=True, shared=False)
def quick(key: str) -> None:
    """Run without a lock and without a result; no other task here does."""
    journal.write(key, "quick")
