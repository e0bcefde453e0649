"""Locked tasks with base classes of others, before `LockedTask` and behind it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

from celery import Task

from celery_distlock import Lock, LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

try:
    from celery_batches import Batches
except ImportError:  # in environments with other versions
    Batches = None

app = make_app(__name__, broker_pool_limit=2, distlock_sweep_interval=0.3)
install(app)
journal = Journal.of_environment()
deferred: list[Callable[[], Any]] = []


def commit() -> list[Any]:
    """Send what was deferred in this process; return what that returns."""
    calls, deferred[:] = deferred[:], []
    return [call() for call in calls]


class OnCommit(Task):
    """Sends nothing until a transaction is committed."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        send = super().apply_async
        deferred.append(lambda: send(args, kwargs, **options))


class Traced(Task):
    """Adds a keyword where a call is sent, and takes it away where it runs."""

    abstract = True
    typing = False
    traces = 0

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        type(self).traces += 1
        traced = {**(kwargs or {}), "trace": f"trace {self.traces}"}
        return super().apply_async(args, traced, **options)

    def __call__(self, *args: Any, trace: str = "", **kwargs: Any) -> Any:
        self.request.trace = trace
        return super().__call__(*args, **kwargs)


class Tagged(Task):
    """Adds a header and a countdown to what a call says."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        added = {"headers": {"tag": "tagged"}, "countdown": 0.5}
        return super().apply_async(args, kwargs, **{**options, **added})


class RunsCoroutines(Task):
    """Runs what a body returns."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = super().__call__(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result


def base_of(other: type, order: str) -> type:
    bases = (other, LockedTask) if order == "before" else (LockedTask, other)
    return type(f"Locked{other.__name__}", bases, {"abstract": True})


def declare(name: str, base: type, function: Callable[..., Any], **options: Any) -> Any:
    options = {"lock_key": "{key}", "shared": False, "bind": True, "name": name, **options}
    return app.task(base=base, **options)(function)


def work(self: Any, key: str, note: str = "") -> str:
    journal.write(key, note)
    journal.write(f"{key}:began", time.time())
    found = self.request.get("trace") or self.request.get("tag") or ""
    return found if self.lock else "no lock"


def later(self: Any, key: str) -> Any:
    async def body() -> bool:
        return Lock(key, store=None).locked()

    return body()


ORDERS = ("before", "behind")
WAYS = {"broker": {}, "store": {"lock_via": "store"}, "unique": {"lock_unique": "started"}}
on_commit, traced, tagged = (
    {
        (order, way): declare(f"{name}_{order}_{way}", base_of(other, order), work, **options)
        for order in ORDERS
        for way, options in WAYS.items()
    }
    for name, other in (("on_commit", OnCommit), ("traced", Traced), ("tagged", Tagged))
)
plain = declare("plain", LockedTask, work, lock_via="store")
runs_coroutines = {
    order: declare(f"coroutines_{order}", base_of(RunsCoroutines, order), later) for order in ORDERS
}

if Batches is not None:

    @app.task(base=Batches, flush_every=2, flush_interval=0.2, shared=False)
    def batched(requests: list[Any]) -> None:
        key = requests[0].args[0]
        with Lock(key):
            inside = journal.enter(key)
            journal.write(key, [len(requests), inside])
            journal.pass_gate(key)
            journal.leave(key)
