"""Locked tasks that write down which of their hooks and signals have the key."""

from __future__ import annotations

from typing import Any

from celery import current_task
from celery import signals as celery_signals

from celery_distlock import LockedTask, install, policies, signals
from celery_distlock.naming import PARKED
from celery_distlock.runtime.app import Runtime
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__, distlock_lease=30.0, distlock_sweep_interval=0.5)
install(app)
journal = Journal.of_environment()


def note(task_id: str, what: str, key: str) -> None:
    """Write down that *what* runs, and whether its task holds its key, or has it reserved."""
    now = Runtime.of(app).store.inspect(key)
    own = now.run.startswith(f"{task_id}:")
    state = "" if not own else "reserved" if now.owner.startswith(PARKED) else "held"
    journal.write(f"noted:{task_id}", [what, state])


def _hook(name: str, place: int) -> Any:
    """A handler of Celery's; *place* is that of the task's id among its arguments."""

    def handler(self: Any, *args: Any) -> None:
        note(args[place], f"{name}{', with a lock' * bool(self.lock)}", args[place + 1][0])

    return handler


class Noting(LockedTask):
    abstract = True

    before_start = _hook("before_start", 0)
    on_success = _hook("on_success", 1)
    on_failure = _hook("on_failure", 1)
    on_retry = _hook("on_retry", 1)
    after_return = _hook("after_return", 2)


def _of_request(name: str) -> None:
    def receiver(state: str = "", **_: Any) -> None:
        request = current_task.request
        if state:
            journal.write(f"ends:{request.id}", state)
        note(request.id, name, request.args[0])

    getattr(celery_signals, name).connect(receiver, weak=False)


def _of_lock(name: str) -> None:
    def receiver(sender: Any, key: str, task_id: str = "", **_: Any) -> None:
        if task_id:
            late = name == "lock_released" and app.AsyncResult(task_id).ready()
            note(task_id, f"{name}{', late' * late}", key)

    getattr(signals, name).connect(receiver, weak=False)


for each in ("prerun", "postrun", "success", "failure", "retry"):
    _of_request(f"task_{each}")
for each in ("lock_acquired", "lock_conflict", "lock_released", "task_parked", "task_woken"):
    _of_lock(each)


@celery_signals.task_received.connect
def _received(request: Any, **_: Any) -> None:
    journal.write(f"received:{request.id}", None)


@celery_signals.before_task_publish.connect
def _sends_a_link(routing_key: str = "", **_: Any) -> None:
    if routing_key == "links" and current_task:
        note(current_task.request.id, "links", current_task.request.args[0])


def work(self: Any, key: str, end: str = "") -> None:
    note(self.request.id, "the body", key)
    if end == "fails":
        raise KeyError(key)
    if end == "retries" and not self.request.retries:
        raise self.retry(countdown=60)


TASKS = {
    name: app.task(base=Noting, bind=True, shared=False, name=name, **options)(work)
    for name, options in {
        "requeue": {"lock_key": "{key}"},
        "requeue in the pool": {"lock_key": lambda key, end="": key},
        "retry": {"lock_key": "{key}", "lock_on_conflict": policies.Retry(delay=1.0, turns=False)},
        "wait": {"lock_key": "{key}", "lock_on_conflict": "wait", "lock_wait": 60.0},
        "skip": {"lock_key": "{key}", "lock_on_conflict": "skip"},
        "fail": {"lock_key": "{key}", "lock_on_conflict": "fail"},
    }.items()
}


@app.task(shared=False)
def linked() -> None:
    """Never runs: its queue has no worker."""


@app.task(base=LockedTask, bind=True, shared=False, lock_key="{key}")
def stay(self: Any, key: str) -> None:
    """Have the key until its gate is opened."""
    journal.write(f"begun:{key}", self.request.id)
    journal.pass_gate(key)
