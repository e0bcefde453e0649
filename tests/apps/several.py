"""Tasks that need several keys at once, and what a judge has to know of each."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery_distlock import Lock, LockedTask, clock, install, signals
from tests.apps import make_app
from tests.apps.journal import Journal

LEASE = 3.0  # seconds: a busy machine can take two of them away

app = make_app(
    __name__, distlock_lease=LEASE, distlock_sweep_interval=0.5, worker_prefetch_multiplier=4
)
install(app)
journal = Journal.of_environment()


def _of_keys(keys: list[str], *_: Any, **__: Any) -> list[str]:
    return keys


def locked(**options: Any) -> Any:
    options = {"lock_key": _of_keys, "shared": False, **options}
    return app.task(base=LockedTask, bind=True, **options)


def note(task: Any, keys: list[str], pause: float) -> None:
    """Wait for *pause*; write down each key's holder, its first and last moment, and its token."""
    begin = clock.monotonic()
    time.sleep(pause)
    task.lock.ensure_held()
    beliefs = [
        [hold.key, begin, clock.monotonic(), hold.token, task.request.id]
        for hold in task.lock._holds
    ]
    assert sorted(belief[0] for belief in beliefs) == sorted(set(keys))
    journal.write("beliefs", beliefs)


@locked()
def use(self: Any, keys: list[str], pause: float = 0.02) -> int:
    note(self, keys, pause)
    return self.request.retries


@locked(lock_key=["{a}", "{b}"])
def use_pair(self: Any, a: str, b: str, pause: float = 0.02) -> None:
    """As `use`, but the worker's main process knows the keys."""
    note(self, [a, b], pause)


@locked(lock_key=["{a}", "{b}", "{c}"])
def use_triple(self: Any, a: str, b: str, c: str, pause: float = 0.02) -> None:
    note(self, [a, b, c], pause)


@locked(lock_key="{a}")
def stay(self: Any, a: str, gate: str) -> None:
    """Stay under one key until the gate is opened."""
    journal.write(f"begun:{gate}", self.request.id)
    journal.pass_gate(gate)
    note(self, [a], 0.0)


@signals.task_parked.connect
def write_parked(sender: Any, key: str, task_id: str, holder: str, **_: Any) -> None:
    journal.write(f"parked:{task_id}", [key, holder])


@locked(acks_late=True)
def use_late(self: Any, keys: list[str], pause: float = 0.02) -> None:
    note(self, keys, pause)


@locked(lock_on_conflict="wait", lock_wait=60.0)
def use_waiting(self: Any, keys: list[str], pause: float = 0.02) -> None:
    note(self, keys, pause)


@locked()
def use_till(self: Any, keys: list[str], gate: str) -> None:
    journal.write(f"begun:{gate}", [os.getpid(), self.request.id])
    journal.pass_gate(gate)
    note(self, keys, 0.0)


@locked(acks_late=True, reject_on_worker_lost=True)
def die_once(self: Any, keys: list[str], name: str) -> None:
    if journal.write(f"dying:{name}", None) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    note(self, keys, 0.0)


@locked(lock_on_failure="requeue", lock_max_requeues=2)
def fail_once(self: Any, keys: list[str], name: str) -> None:
    if journal.write(f"failing:{name}", None) == 1:
        raise KeyError(name)
    note(self, keys, 0.0)


@locked(lock_hold_on_retry=True, max_retries=1)
def retry_once(self: Any, keys: list[str], name: str) -> None:
    journal.write("order", name)
    if not self.request.retries:
        raise self.retry(countdown=0.3)
    note(self, keys, 0.0)


@locked()
def lock_another(self: Any, keys: list[str], gate: str, another: str) -> None:
    """Block for one more key in the middle, which no task that parks should do."""
    journal.write(f"begun:{gate}", [os.getpid(), self.request.id])
    journal.pass_gate(gate)
    with Lock(another):
        note(self, [*keys], 0.0)
