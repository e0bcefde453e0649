"""
Tasks that write down what their request says, and send children with its headers.

As a process it sends, for each line of its input, one of them from within a trace of its own.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from celery import signals

from celery_distlock import LockedTask, install, policies
from celery_distlock.unique import Unique
from tests import tracing
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(
    __name__, distlock_sweep_interval=0.3, task_acks_late=True, task_reject_on_worker_lost=True
)
install(app)
tracing.instrument()
journal = Journal.of_environment()


@signals.task_prerun.connect(weak=False)
def _put_into_request(task: Any, **_: Any) -> None:
    """Do as a tracer does that keeps what is its own in the request."""
    task.request.span = object()


def seen(request: Any) -> dict[str, Any]:
    facts = vars(request)
    return {
        "headers": request.headers,
        "names": sorted(name for name in facts if name != "_children"),
        "marked": "distlock" in repr(facts),
        "trace": tracing.ids(),
    }


def _spoil(request: Any) -> None:
    """Change what headers hold, as code may that puts its own into them."""
    for value in (request.headers or {}).values():
        if isinstance(value, dict):
            value["spoilt"] = True


def work(self: Any, key: str, how: str = "") -> None:
    times = journal.write(f"{self.request.id}:saw", seen(self.request))
    if how == "gate":
        journal.pass_gate(key)
    if times > 1:
        return
    if how == "retry":
        raise self.retry(countdown=0)
    if how:
        _spoil(self.request)
    if how == "fail":
        raise ValueError(key)
    if how == "postpone":
        self.lock.postpone(0.05)


def declare(name: str, **options: Any) -> Any:
    options = {"base": LockedTask, "lock_key": "{key}", **options}
    return app.task(bind=True, name=name, shared=False, **options)(work)


plain = app.task(bind=True, name="plain", shared=False)(work)
locked = declare("locked", lock_on_failure="requeue", lock_max_requeues=1)
unique = declare("unique", lock_unique="finished")
skipped = declare("skipped", lock_on_conflict="skip")
refused = declare("refused", lock_on_conflict="fail")
reported = declare("reported", lock_on_conflict="fail")
reported.throws = ()
losing = declare("losing", lock_lease=12.0)
resent = declare("resent", lock_on_conflict=policies.Retry(delay=0.2, factor=1.0, turns=False))
updating = declare("updating", lock_unique=Unique("started", duplicate="update"))
CHILDREN = {task.name: task for task in (plain, locked, unique)}


@app.task(bind=True, base=LockedTask, lock_key="{key}", shared=False)
def parent(self: Any, key: str, child: str, child_key: str) -> None:
    """Hand the headers on to a child, as one does with a tenant or a trace, and stay."""
    journal.write(f"{key}:pid", os.getpid())
    headers = self.request.headers
    sent = CHILDREN[child].apply_async((child_key,), headers=headers)
    journal.write(f"{key}:child", sent.id)
    journal.pass_gate(key)


@app.task(bind=True, base=LockedTask, lock_key="{key}", shared=False)
def failing_parent(self: Any, key: str, child: str) -> None:
    """Fail once, so that it is put back; then hand the headers on to a child that fails once."""
    if journal.write(key, None) == 1:
        self.lock.postpone(0.05)
    sent = CHILDREN[child].apply_async((f"{key}:child", "fail"), headers=self.request.headers)
    journal.write(f"{key}:child", sent.id)


@app.task(bind=True, base=LockedTask, lock_key="{key}", shared=False)
def calling_parent(self: Any, key: str, how: str, child_key: str) -> None:
    """Have a locked task run in this process, which hands its headers on to a child."""
    run = {
        "apply": lambda: go_between.apply((f"{key}:between", child_key), throw=True),
        "call": lambda: go_between(f"{key}:between", child_key),
    }[how]
    run()


@app.task(bind=True, base=LockedTask, lock_key="{key}", shared=False)
def go_between(self: Any, key: str, child_key: str) -> str:
    sent = locked.apply_async((child_key,), headers=self.request.headers)
    journal.write(f"{child_key}:child", sent.id)
    return str(sent.id)


def send(self: Any, key: str) -> str:
    return str(plain.delay(key).id)


plain_sender = app.task(bind=True, name="plain_sender", shared=False)(send)
locked_sender = app.task(
    bind=True, name="locked_sender", base=LockedTask, lock_key="{key}", shared=False
)(send)


def main() -> None:
    for line in sys.stdin:
        name, args, options = json.loads(line)
        tracing.finished.clear()
        with tracing.trace():
            result = app.tasks[name].apply_async(args, **options)
            facts = {"id": result.id, "trace": tracing.ids()}
        print(json.dumps({**facts, "spans": tracing.finished}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
