"""Tasks of which only the newest call is to run to its end."""

from __future__ import annotations

import os
import time
from typing import Any

from celery_distlock import LockedTask, install, signals
from celery_distlock.errors import RecalledError
from celery_distlock.unique import Latest
from tests.apps import make_app
from tests.apps.journal import Journal

LEASE = 3.0  # seconds: a busy machine can take two of them away

app = make_app(
    __name__,
    distlock_lease=LEASE,
    distlock_sweep_interval=0.5,
    worker_prefetch_multiplier=1,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
)
install(app)
journal = Journal.of_environment()


@signals.lock_renewed.connect
@signals.lock_recalled.connect
def note_lease(signal: Any, *, key: str, **_: Any) -> None:
    journal.write(f"{key}:lease", signal.name)


def latest(rule: Latest, **options: Any) -> Any:
    options = {"lock_key": "{key}", "shared": False, **options}
    return app.task(base=LockedTask, bind=True, lock_unique=rule, **options)


STOP = Latest(running="stop")


def work(self: Any, key: str, version: Any, seconds: float, cleans_up: float = 0.0) -> Any:
    """Work on *version*; what it notes has its token, so that an overlap shows."""

    def note(what: str) -> None:
        journal.write(key, [what, version, self.lock.token])

    note("begin")
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            time.sleep(0.005)
    except RecalledError:
        note("asked")
        time.sleep(cleans_up)
        raise
    finally:
        note("end")
    return version


preview = latest(STOP, name="preview")(work)
preview_with_result = latest(Latest(running="stop", result="superseded"), name="with_result")(work)
preview_for_long = latest(STOP, name="preview_for_long", lock_lease=30.0)(work)


@latest(STOP)
def retry_at_once(self: Any, key: str, version: Any) -> Any:
    """Wait until a newer call has come, and ask for a retry before it is notified of that."""
    journal.write(key, ["begin", version, self.lock.token])
    if version == "old":
        journal.pass_gate(key)
        assert not self.lock.recalled
        raise self.retry(countdown=0)
    return version


@latest(Latest(running="tell"))
def look(self: Any, key: str, version: Any) -> Any:
    """Go on until it sees that it is superseded."""
    journal.write(key, ["begin", version, self.lock.token])
    begin = time.monotonic()
    while version == "old" and time.monotonic() < begin + 60:
        if self.lock.recalled:
            time.sleep(0.5)  # nothing is raised
            return "saw it"
        time.sleep(0.005)
    return version


@latest(STOP)
def stay_whatever_comes(self: Any, key: str, version: Any, gate: str) -> Any:
    """Be recalled, write that down, and stay until it is killed."""
    journal.write(key, ["begin", version, self.lock.token])
    if version != "old":
        return version
    try:
        time.sleep(60)
    except RecalledError:
        journal.write(f"{key}:pid", os.getpid())
        time.sleep(60)


@latest(Latest(running="stop", result="superseded"))
def call_itself(self: Any, key: str, version: Any, depth: int = 1) -> Any:
    if version == "old" and depth:
        return [call_itself(key, version, depth - 1)]
    return work(self, key, version, 60.0 if version == "old" else 0.0)


@app.task(shared=False)
def total(numbers: list[Any]) -> list[Any]:
    return numbers
