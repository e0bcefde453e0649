"""
Celery events for what happens to locks: ``distlock-acquired``, ``distlock-parked``, ...

Sent where a worker sends events at all (``-E``, or ``celery control enable_events``), and by a
thread, so that a broker that is away holds up no task. An event has the name of a signal and its
arguments, besides ``task`` and ``uuid`` where it is about a task. They are in a group of their own:
one of ``task-`` would be shown as the task's state.
"""

import functools
from collections.abc import Mapping
from typing import Any

from celery import Celery

from .teller import teller

__all__ = ["send", "switch"]

_as_worker = ""


def switch(nodename: str) -> None:
    """Send events from now on, as those of the worker *nodename*; none if that is empty."""
    global _as_worker  # noqa: PLW0603  # a process is of one worker
    _as_worker = nodename


def send(app: Celery, name: str, task: str, facts: Mapping[str, Any]) -> None:
    """Send what the signal *name* says as an event, if there are to be events."""
    if _as_worker:
        kind = f"distlock-{name.partition('_')[2]}"
        fields = {"task": task, **facts}
        if "task_id" in fields:
            fields["uuid"] = fields.pop("task_id")
        teller().tell(functools.partial(_send, app, _as_worker, kind, fields))


def _send(app: Celery, nodename: str, kind: str, fields: Mapping[str, Any]) -> None:
    with app.events.default_dispatcher(hostname=nodename) as dispatcher:
        dispatcher.send(kind, **fields)
