"""Locked tasks whose classes have a ``__call__``, or end, before their lock is taken."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from celery import Task
from celery.exceptions import Reject

from celery_distlock import LockedTask, install
from tests.apps import make_app
from tests.apps.journal import Journal

app = make_app(__name__, distlock_sweep_interval=0.3, worker_prefetch_multiplier=1)
install(app)
journal = Journal.of_environment()


class PastLock(LockedTask):
    """Runs the task's function itself."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class OnToLock(LockedTask):
    """Does something, and goes on to the lock."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Decorated(LockedTask):
    """Has the same decorator around all that Celery calls."""

    abstract = True

    @decorated
    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        super().before_start(task_id, args, kwargs)

    @decorated
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


class Begin(Task):
    """Ends before the body begins, as *how* says."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        key, how = args
        times = journal.write(f"{key}:begun", how)
        if how == "fail" or (how == "retry" and self.request.retries):
            raise ValueError(key)
        if how == "reject" and times == 1:
            raise Reject(requeue=True)


class Beginning(LockedTask, Begin):
    abstract = True


def work(self: Any, key: str, how: str = "") -> bool:
    journal.write(key, how)
    if how == "gate":
        journal.pass_gate(key)
    if how == "retry":
        raise self.retry(countdown=0.5)
    return bool(self.lock)


def declare(name: str, base: type, **options: Any) -> Any:
    options = {"lock_key": "{key}", "shared": False, **options}
    return app.task(base=base, bind=True, name=name, **options)(work)


past_lock = {
    "early": declare("past_lock_early", PastLock),
    "late": declare("past_lock_late", PastLock, acks_late=True),
    "sent": declare("past_lock_sent", PastLock, lock_via="store"),
}
past_nothing = declare("past_nothing", PastLock, lock_key=lambda key, how="": None)
on_to_lock = declare("on_to_lock", OnToLock)
decorated_alike = declare("decorated_alike", Decorated, lock_wait=0.2)
begin = {
    "early": declare("begin_early", Beginning),
    "late": declare("begin_late", Beginning, acks_late=True),
    "kept": declare("begin_kept", Beginning, lock_hold_on_retry=True, lock_lease=120.0),
}


class CallsItself(LockedTask):
    """Calls the task from the handler that *how* names, with another key or the same."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        self._call("before_start", *args)

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        self._call("on_success", *args)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        if status == "SUCCESS":
            self._call("after_return", *args)

    def _call(self, handler: str, key: str, how: str) -> None:
        if not how.startswith(handler):
            return
        try:
            self(key if how.endswith("itself") else f"{key}:inner", how)
        except Exception as error:  # noqa: BLE001
            journal.write(f"{key}:error", type(error).__name__)
        if how.endswith("fails"):
            raise ValueError(key)


calls_itself = declare("calls_itself", CallsItself, lock_wait=0.2)
