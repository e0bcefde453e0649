"""Tasks of a worker whose neighbours hang; its journal is where ``DISTLOCK_TEST_JOURNAL`` says."""

from __future__ import annotations

import os
import signal
from typing import Any

from celery_distlock import LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__)
app.conf.update(
    distlock_prefix=f"{os.environ['DISTLOCK_TEST_PREFIX']}:lock",
    distlock_sweep_interval=0.5,
)
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


@app.task(shared=False)
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(base=LockedTask, lock_key="{key}", shared=False)
def note_failure(request: Any, error: BaseException, traceback: Any, key: str) -> None:
    """An errback, which Celery calls in the main process if the task's own has died."""
    journal.write(key, type(error).__name__)


@app.task(ignore_result=True, shared=False)
def quick(key: str) -> None:
    """The one task that needs no lock, and whose result nobody wants."""
    journal.write(key, "quick")
