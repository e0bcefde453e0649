"""Tasks that are asked to leave, and what they do then."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

from celery_distlock import Lock, LockedTask, install
from celery_distlock.errors import RecalledError
from tests.apps import make_app
from tests.apps.bodies import go_on
from tests.apps.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE = 3.0  # seconds: a busy machine can take two of them away; renewed each second

app = make_app(
    __name__, distlock_lease=LEASE, distlock_sweep_interval=0.5, worker_prefetch_multiplier=1
)
install(app)
journal = Journal.of_environment()


def locked(**options: Any) -> Any:
    options = {"lock_key": "{key}", "shared": False, **options}
    return app.task(base=LockedTask, bind=True, **options)


# What a body is at


def sleep(_: Any) -> None:
    time.sleep(60)


def receive(_: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(60)
        ours.recv(1)


def run_a_loop(_: Any) -> None:
    asyncio.run(asyncio.sleep(60))


WAYS: dict[str, Callable[[Any], None]] = {
    "sleep": sleep,
    "receive": receive,
    "turn": go_on,
    "run_a_loop": run_a_loop,
}


@locked()
def stay(self: Any, key: str, way: str) -> str:
    """Stay as long as it may; note whether it then still holds its key."""
    journal.write(key, "begun")
    try:
        for _ in range(10):
            try:
                WAYS[way](self.lock)
            except Exception as error:  # noqa: BLE001  # as careless code does
                journal.write(f"{key}:caught", repr(error))
    finally:
        journal.write(f"{key}:left", [self.lock.recalled, self.lock.held, time.time()])
    return "stayed"


@locked()
def follow(self: Any, key: str) -> float:
    return time.time()


# What it ends with


def wait_for_a_recall(task: Any, key: str) -> None:
    journal.write(key, "begun")
    go_on(task.lock)


@locked()
def catch(self: Any, key: str) -> list[Any]:
    try:
        wait_for_a_recall(self, key)
    except RecalledError as error:
        turns = 0
        while turns < 500:  # nothing is raised again
            turns += 1
            time.sleep(0.001)
        return [error.key, error.token == self.lock.token, error.by, turns]
    return []


@locked(autoretry_for=(Exception,), retry_kwargs={"countdown": 0}, retry_backoff=False)
def fail_and_be_retried(self: Any, key: str) -> None:
    try:
        wait_for_a_recall(self, key)
    except RecalledError:
        raise ValueError("while it cleaned up") from None


@locked()
def retry(self: Any, key: str) -> None:
    try:
        wait_for_a_recall(self, key)
    except BaseException as error:
        raise self.retry(countdown=0) from error


@locked()
def postpone(self: Any, key: str) -> None:
    try:
        wait_for_a_recall(self, key)
    except RecalledError:
        self.lock.postpone(0.1)


@locked(lock_on_failure="requeue")
def fail(self: Any, key: str) -> None:
    try:
        wait_for_a_recall(self, key)
    except RecalledError:
        raise ValueError("while it cleaned up") from None


@locked(lock_on_failure="requeue")
def leave(self: Any, key: str) -> None:
    wait_for_a_recall(self, key)


@locked(lock_on_lost="warn")
def look(self: Any, key: str) -> bool:
    journal.write(key, "begun")
    for _ in range(60_000):
        if self.lock.recalled:
            return self.lock.held
        time.sleep(0.001)
    return False


@locked()
def call_itself(self: Any, key: str, depth: int = 1) -> None:
    try:
        if depth:
            call_itself(key, depth - 1)
        else:
            wait_for_a_recall(self, key)
    finally:
        journal.write(f"{key}:left", [depth, self.lock.held])


@locked()
def take_another(self: Any, key: str, other: str) -> None:
    with Lock(other):
        wait_for_a_recall(self, key)


@locked(soft_time_limit=5)
def clean_up_for_long(self: Any, key: str) -> None:
    try:
        wait_for_a_recall(self, key)
    finally:
        journal.write(f"{key}:left", "begun")
        go_on(self.lock)
