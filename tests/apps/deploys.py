"""Locked tasks of a moment among a backlog of plain ones, in more than one queue."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from kombu import Queue

from celery_distlock import Key, LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(
    __name__,
    task_queues=[Queue("celery"), Queue("other")],
    task_default_queue="celery",
    task_ignore_result=True,
)
app.conf.update(json.loads(os.environ.get("DISTLOCK_TEST_DEPLOYS", "{}")))
install(app)
journal = Journal.of_environment()


@app.task(base=LockedTask, bind=True, lock_key="{key}", shared=False)
def brief(self: Any, key: str, number: int) -> None:
    journal.write(key, [number, time.time(), self.request.hostname])
    time.sleep(0.01)


MOVED = os.environ.get("DISTLOCK_TEST_DEPLOYS_MOVED", "{key}")
TERMS = json.loads(os.environ.get("DISTLOCK_TEST_DEPLOYS_TERMS", "{}"))
POLICY = os.environ.get("DISTLOCK_TEST_DEPLOYS_POLICY", "requeue")


def moved(key: str) -> Key | None:
    return Key(MOVED.format(key=key), **TERMS) if MOVED else None


def note_and_wait(self: Any, key: str) -> None:
    journal.write(key, list(self.lock.keys))
    journal.pass_gate(key)
    journal.write(f"{key}:end", None)


@app.task(
    base=LockedTask,
    bind=True,
    lock_key=moved,
    lock_on_conflict=POLICY,
    lock_lease=5.0,
    acks_late=True,
    reject_on_worker_lost=True,
    shared=False,
)
def at_another_key(self: Any, key: str) -> None:
    note_and_wait(self, key)


@app.task(base=LockedTask, bind=True, lock_key=moved, lock_lease=5.0, shared=False)
def early_at_another_key(self: Any, key: str) -> None:
    note_and_wait(self, key)


def both(key: str) -> list[str]:
    return MOVED.format(key=key).split()


@app.task(base=LockedTask, bind=True, lock_key=both, shared=False)
def at_other_keys(self: Any, key: str) -> None:
    journal.write(f"{key}:begun", list(self.lock.keys))


@app.task(
    base=LockedTask,
    lock_key="{key}",
    lock_on_conflict=POLICY,
    shared=False,
)
def of_another_policy(key: str) -> None:
    journal.write(key, os.getpid())


@app.task(shared=False)
def pass_gate(name: str) -> None:
    journal.write(name, None)
    journal.pass_gate(name)


LOCKED = {"base": LockedTask, "lock_key": "{key}", "lock_via": "store"}
UNLOCKED = bool(os.environ.get("DISTLOCK_TEST_DEPLOYS_UNLOCKED"))


@app.task(**({} if UNLOCKED else LOCKED), shared=False)
def locked_no_more(key: str) -> None:
    journal.write(key, os.getpid())


@app.task(shared=False)
def pause(seconds: float, name: str) -> None:
    journal.write(name, None)
    time.sleep(seconds)


if os.environ.get("DISTLOCK_TEST_DEPLOYS_KNOWS_MORE"):

    @app.task(base=LockedTask, lock_key="{key}", shared=False)
    def of_the_new_version(key: str) -> None:
        journal.write(key, os.getpid())
