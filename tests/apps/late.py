"""Tasks with late acknowledgement that come back from the queue to find things changed."""

from __future__ import annotations

import os
from typing import Any

import redis

from celery_distlock import LockedTask, install
from tests.apps import make_app

app = make_app(__name__)
app.conf.update(
    task_acks_late=True,
    distlock_url=os.environ["DISTLOCK_TEST_BROKER"],
    distlock_prefix=os.environ["DISTLOCK_TEST_PREFIX"],
)
install(app)
memory = redis.Redis.from_url(os.environ["DISTLOCK_TEST_BROKER"], decode_responses=True)
NAME = f"{os.environ['DISTLOCK_TEST_PREFIX']}:late:"


def key_of(name: str) -> str | None:
    """What the test says: a key, nothing for none, or "raise"."""
    value = memory.get(f"{NAME}key:{name}")
    if value == "raise":
        raise LookupError("the order is gone")
    return value or None


@app.task(base=LockedTask, lock_key=["a:{name}", "b:{name}"], shared=False)
def two_keys(name: str) -> int:
    return memory.incr(f"{NAME}runs:{name}")  # type: ignore[return-value]


@app.task(base=LockedTask, lock_key=key_of, shared=False)
def changing(name: str) -> int:
    return memory.incr(f"{NAME}runs:{name}")  # type: ignore[return-value]


@app.task(base=LockedTask, lock_key="outer:{name}", shared=False)
def changing_child(name: str) -> str:
    return "child"


@app.task(base=LockedTask, lock_key="outer:{name}", shared=False, bind=True)
def parent_that_waits(self: Any, name: str) -> None:
    """Start a child that needs the same key, and hold on until it is parked."""
    child = changing_child.delay(name)
    memory.set(f"{NAME}child:{name}", child.id)
    while memory.get(f"{NAME}gate:{name}") is None:
        pass
