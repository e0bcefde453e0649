"""
Locked tasks with an agent for monitoring, and all ways to send them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
import uuid
from typing import Any

from celery import chain, chord, group
from celery.beat import ScheduleEntry, Scheduler
from celery.result import allow_join_result
from celery.schedules import schedule

from celery_distlock import Lock, LockedTask, install
from celery_distlock.runtime.app import Runtime
from celery_distlock.unique import Debounce, Throttle
from tests import patching
from tests.apps import make_app
from tests.apps.journal import Journal
from tests.waiting import wait_until

app = make_app(
    __name__, distlock_lease=3.0, distlock_sweep_interval=0.5, worker_prefetch_multiplier=1
)
install(app)
journal = Journal.of_environment()


def locked(**options: Any) -> Any:
    return app.task(bind=True, lock_key="{key}", shared=False, **{"base": LockedTask, **options})


def work(self: Any, key: str, note: Any = None) -> Any:
    """Be alone under the key, and return the note."""
    assert self.lock.keys == (key,)
    assert journal.enter(key) == 1
    journal.write(key, note)
    journal.leave(key)
    return note


plain = locked(name="plain")(work)
once = locked(name="once", lock_unique="started")(work)
debounced = locked(name="debounced", lock_unique=Debounce(0.2))(work)
throttled = locked(name="throttled", lock_unique=Throttle(0.1))(work)
waits = locked(name="waits", lock_on_conflict="wait", lock_wait=60.0)(work)
resent = locked(name="resent", lock_on_conflict="retry")(work)


@locked()
def retried(self: Any, key: str, note: Any) -> Any:
    if not self.request.retries:
        raise self.retry(countdown=0.01)
    return work(self, key, note)


@locked(lock_on_failure="requeue", lock_max_requeues=1)
def requeued(self: Any, key: str, note: Any) -> Any:
    if journal.write(f"{key}:failing", note) == 1:
        raise KeyError(key)
    return work(self, key, note)


@locked()
def postponed(self: Any, key: str, note: Any) -> Any:
    if journal.write(f"{key}:early", note) == 1:
        self.lock.postpone(0.05)
    return work(self, key, note)


@locked()
def replaced(self: Any, key: str, note: Any) -> Any:
    return self.replace(plain.si(f"{key}:next", note))


@locked(lock_lease=1.0)
def loses(self: Any, key: str, note: Any) -> Any:
    """Lose the key in a coroutine that is not awaited yet: asyncio would keep the error."""

    async def lose() -> None:
        journal.delete(f"{app.conf.distlock_prefix}:{{{key}}}:lock")
        wait_until(lambda: False)

    async def main() -> None:
        other = asyncio.create_task(lose())
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.gather(other, return_exceptions=True)

    asyncio.run(main())
    return note


class Calling(LockedTask):
    """Calls another locked task in a handler, which is no part of its own run."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        plain(f"{args[0]}:before", task_id)


calling = locked(base=Calling, name="calling")(work)


class OfItsOwn(LockedTask):
    """A task that is a class, and the base of another one."""

    name = "of_its_own"
    lock_key = "{key}"

    def run(self, key: str, note: Any) -> Any:
        return work(self, key, note)


class OfThat(OfItsOwn):
    name = "of_that"


of_its_own, of_that = app.register_task(OfItsOwn()), app.register_task(OfThat())


@app.task(shared=False)
def unlocked(note: Any) -> Any:
    return note


@app.task(shared=False)
def send_from_worker() -> list[str]:
    with allow_join_result():
        return send_all()


@app.task(shared=False)
def patched() -> dict[str, int]:
    """Return what went through a patch in the worker that does this."""
    return dict(patching.calls)


# The ways


def _behind(key: str, *tasks: Any) -> list[Any]:
    """Send tasks while their key is taken, and return their results."""
    with Lock(key, timeout=30, store=Runtime.of(app).store):
        results = [task.delay(key, number) for number, task in enumerate(tasks)]
        waiting = sum(task is not resent for task in tasks)
        wait_until(lambda: Runtime.of(app).store.inspect(key).waiting == waiting, what="its queue")
    return [result.get(timeout=30) for result in results]


def _by_beat(key: str) -> Any:
    entry = ScheduleEntry(task="plain", schedule=schedule(1.0), args=(key, 1), app=app)
    Scheduler(app, lazy=True).apply_entry(entry)
    return journal.wait(key)[0]


def _lost(key: str) -> str:
    result = loses.delay(key, 1)
    return type(result.get(timeout=30, propagate=False)).__name__


def _twice(task: Any, key: str) -> list[Any]:
    return [each.get(timeout=30) for each in (task.delay(key, 1), task.delay(key, 1))]


def _get(result: Any) -> Any:
    return result.get(timeout=30)


WAYS: dict[str, Any] = {
    **{
        each.name.rpartition(".")[2]: (lambda key, task=each: _get(task.delay(key, 1)), 1)
        for each in (plain, once, retried, requeued, postponed, replaced, calling, of_its_own)
    },
    "of that": (lambda key: _get(of_that.delay(key, 1)), 1),
    "by keyword": (lambda key: _get(plain.apply_async(kwargs={"key": key, "note": 1})), 1),
    "in a while": (lambda key: _get(plain.apply_async((key, 1), countdown=0.01)), 1),
    "store": (lambda key: _get(plain.apply_async((key, 1), lock_via="store")), 1),
    "store, later": (
        lambda key: _get(plain.apply_async((key, 1), lock_via="store", countdown=0.01)),
        1,
    ),
    "debounced": (lambda key: _twice(debounced, key), [1, 1]),
    "throttled": (lambda key: _twice(throttled, key), [1, 1]),
    "retry, store": (lambda key: _get(retried.apply_async((key, 1), lock_via="store")), 1),
    "chain": (lambda key: _get(chain(plain.si(key, 1), once.si(key, 2))()), 2),
    "group": (lambda key: _get(group(plain.s(key, 1), of_its_own.s(key, 2))()), [1, 2]),
    "chord": (lambda key: _get(chord([plain.s(key, 1), once.s(key, 2)], unlocked.s())()), [1, 2]),
    "apply": (lambda key: plain.apply((key, 1)).get(), 1),
    "call": (lambda key: plain(key, 1), 1),
    "call of a class": (lambda key: of_that(key, 1), 1),
    "by name": (lambda key: _get(app.send_task("plain", (key, 1))), 1),
    "by a signature": (lambda key: _get(app.signature("once", (key, 1)).apply_async()), 1),
    "beat": (_by_beat, 1),
    "parked": (lambda key: _behind(key, plain, plain, of_that, plain), [0, 1, 2, 3]),
    "stored": (lambda key: _behind(key, once, once), [0, 1]),
    "waiting": (lambda key: _behind(key, waits, plain), [0, 1]),
    "sent again": (lambda key: _behind(key, resent), [0]),
    "lost": (_lost, "LockLostError"),
    "unlocked": (lambda _: _get(unlocked.delay(1)), 1),
}


def send_all() -> list[str]:
    """Send by every way; return what went wrong, by the way's name."""
    failures = []
    for name, (way, expected) in WAYS.items():
        key = f"{name}-{uuid.uuid4()}"
        try:
            found = way(key)
            assert found == expected, found
        except Exception:  # noqa: BLE001  # the others go on
            failures.append(f"{name}: {traceback.format_exc()}")
    return failures


def main() -> None:
    """Send them all, print what went through a patch, and end with what went wrong."""
    failures = send_all()
    print(json.dumps(patching.calls))  # noqa: T201
    sys.exit("\n".join(failures) or None)


patching.patch("after")
