"""
Parks a task when its message arrives, if it would only find its key taken by its neighbours.

A way through the pool, to park there, costs ten times as much, and keeps the pool from the tasks
that are woken. So the main process parks what it can tell has to wait: a task whose key one of its
own unfinished tasks has. Everything else goes to the pool, which asks for the key as always.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from celery.worker import state
from celery.worker.strategy import default

from celery_distlock.envelope import HEADER, Passage, run_id, seal_message
from celery_distlock.execution import PARKED
from celery_distlock.keys import slot_name
from celery_distlock.policies import Requeue
from celery_distlock.reports import Report
from celery_distlock.runtime import Plan, Runtime
from celery_distlock.stores import Ability
from celery_distlock.stores.base import Parcel, Status

__all__ = ["strategy"]

logger = logging.getLogger(__name__)

PATIENCE = 0.25  # seconds that the event loop may be kept waiting; then the pool has to ask


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return what Celery calls with every message for *task*."""
    handle: Callable[..., Any] = default(task, app, consumer, **options)
    runtime = Runtime.of(app)
    plan = runtime.plans.get(task.name)
    if plan is None or not runtime.settings.enabled or not _may_park(task, plan, runtime):
        return handle
    lobby = _Lobby(task, plan, runtime)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        if body is None and lobby.parks(message):
            ack(logger, consumer.connection_errors)
            return None
        return handle(message, body, ack, reject, callbacks, **more)

    return on_message


def _may_park(task: Any, plan: Plan, runtime: Runtime) -> bool:
    # Users' key functions run where their tasks do. Rate limits are for Celery to keep.
    return (
        type(plan.policy) is Requeue
        and plan.rule.runs_no_code
        and not task.rate_limit
        and Ability.PARK in runtime.store.abilities
    )


class _Neighbours:
    """Which unfinished tasks of this worker have which key, by its slot name."""

    def __init__(self) -> None:
        self._ids: dict[str, set[str]] = {}
        self._next_purge = 1000

    def have(self, name: str) -> bool:
        known = self._ids.get(name)
        if known is None:
            return False
        known.intersection_update(state.requests)
        return bool(known)

    def add(self, name: str, identity: str) -> None:
        known = self._ids.setdefault(name, set())
        known.add(identity)
        if len(known) + len(self._ids) > self._next_purge:
            self._purge()

    def _purge(self) -> None:
        unfinished = {name: ids.intersection(state.requests) for name, ids in self._ids.items()}
        self._ids = {name: ids for name, ids in unfinished.items() if ids}
        self._next_purge = max(1000, 4 * len(self._ids))


_neighbours = _Neighbours()


class _Lobby:
    """Parks the messages for one task."""

    def __init__(self, task: Any, plan: Plan, runtime: Runtime) -> None:
        self._task = task
        self._plan = plan
        self._runtime = runtime

    def parks(self, message: Any) -> bool:
        """Whether *message* is parked now; false: it is to go to the pool."""
        identity = message.headers["id"]
        passage = Passage.of(message.headers)
        if passage.woken:  # its turn has come
            _neighbours.add(passage.parked_at, identity)
            return False
        try:
            args, kwargs, _ = message.payload
            keys = self._plan.rule.keys(args, kwargs)
        except Exception:  # noqa: BLE001  # whatever is wrong with it, the task is to fail with it
            return False
        if len(keys) != 1:
            return False
        name = slot_name(keys[0])
        if _neighbours.have(name) and _is_plain(message) and self._park(keys[0], message):
            return True
        _neighbours.add(name, identity)
        return False

    def _park(self, key: str, message: Any) -> bool:
        headers = message.headers
        passage = Passage.of(headers)
        run = run_id(
            headers["id"],
            headers.get("retries") or 0,
            passage.requeues,
            headers.get("replaced_task_nesting") or 0,
        )
        since = passage.since or time.time()
        passage = replace(passage, woken=True, run=run, parked_at=slot_name(key), since=since)
        parcel = Parcel(seal_message(message, passage), self._runtime.desk)
        try:
            self._show_parked(key, message)
            # If it is not parked after all, whoever runs it sets its state right.
            message.properties.setdefault(HEADER, {})["shown"] = True
            reply = self._runtime.store.line_up(key, run, parcel, PATIENCE)
        except Exception as error:  # noqa: BLE001  # nothing here may end the worker's main loop
            logger.debug("%s was not parked when it arrived: %s", headers["id"], error)
            message.delivery_info["redelivered"] = True  # it may have been: the pool looks
            return False
        if reply.status is Status.PARKED:
            report = Report(self._task, headers["id"])
            report.conflict(headers, key, reply)
            report.parking(key, reply)
        return reply.status is Status.PARKED

    def _show_parked(self, key: str, message: Any) -> None:
        # Before it is parked: from then on it may run elsewhere and end before we write.
        ignored = message.headers.get("ignore_result")
        if not (self._task.ignore_result if ignored is None else ignored):
            now = self._runtime.store.inspect(key, PATIENCE)
            info = {"key": key, "holder": now.owner, "place": now.waiting}
            self._task.backend.store_result(message.headers["id"], info, PARKED)


def _is_plain(message: Any) -> bool:
    """Whether nothing but its key could keep *message* from running at once, for the first time."""
    headers = message.headers
    return not (
        headers.get("eta")
        or headers.get("expires")
        or headers.get("stamps")
        or (message.delivery_info or {}).get("redelivered")
        or headers["id"] in state.revoked
    )
