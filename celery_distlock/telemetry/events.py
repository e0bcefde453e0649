"""
Celery events about locks: ``distlock-acquired``, ``distlock-parked``, ...

They are sent if the worker sends events (``-E``, or ``celery control enable_events``), by a thread,
so that an unavailable broker delays no task. An event has the name and the arguments of a signal,
and ``task`` and ``uuid`` if it is about a task. The events have their own group, since monitors
show an event of the group ``task-`` as the state of the task. Two events are in that group on
purpose: ``task-parked``, and ``task-running`` when a parked task has got its key, because Celery's
STARTED cannot follow another state.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from celery import Celery

from celery_distlock.process import forks
from celery_distlock.process.background import BackgroundNotifier

logger = logging.getLogger(__name__)

_STATES = {"task_parked": "task-parked", "task_woken": "task-running"}
QUIET = 5.0  # seconds without events after one could not be sent


class _Source(NamedTuple):
    """The worker that sends the events."""

    app: Celery
    nodename: str


class _Sender:
    """Sends events through a connection that is opened for the first one."""

    def __init__(self) -> None:
        self._connection: Any = None
        self._dispatcher: Any = None
        self._source: _Source | None = None
        self._quiet_until = 0.0

    def send(self, source: _Source, kind: str, fields: Mapping[str, Any]) -> None:
        if time.monotonic() < self._quiet_until:
            return
        try:
            with forks.no_fork():
                self._open(source).send(kind, **fields)
        except Exception as error:  # noqa: BLE001  # each transport raises its own
            logger.info(
                "an event could not be sent; no lock events are sent for %g s: %s",
                QUIET,
                error,
            )
            self._quiet_until = time.monotonic() + QUIET
            self._close()

    def _open(self, source: _Source) -> Any:
        if self._source != source:
            self._close()
            self._connection = source.app.connection_for_write()
            self._dispatcher = source.app.events.Dispatcher(
                self._connection, source.nodename, buffer_while_offline=False
            )
            self._source = source
        return self._dispatcher

    def _close(self) -> None:
        connection, self._connection, self._source = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.release()


source: _Source | None = None  # None: no events are sent
_sender = forks.PerProcess(_Sender, forks.ForkStage.TELEMETRY)  # not the parent's connection
_notifier = BackgroundNotifier("distlock-events")


def set_source(app: Celery, nodename: str) -> None:
    """Send events as the worker *nodename* from now on; empty: send none."""
    global source  # noqa: PLW0603  # a process has one worker
    source = _Source(app, nodename) if nodename else None


def send(name: str, task: str, facts: Mapping[str, Any], *, with_state: bool = True) -> None:
    """
    Send the event for the signal *name*, if this worker sends events.

    *with_state* sends the event that changes the task's state, too. It must be False for a task
    if Celery sends no event at its end.
    """
    if (sending := source) is None:
        return
    fields = {**facts, "timestamp": time.time()}
    if task:
        fields |= {"task": task, "uuid": fields.pop("task_id", "")}
    events = {f"distlock-{name.partition('_')[2]}": fields}
    # A task that is parked on arrival has had no task-received, which has its name.
    if with_state and name in _STATES:
        events[_STATES[name]] = {**fields, "name": task}
    for kind, fields_sent in events.items():
        _notifier.submit(functools.partial(_sender.value.send, sending, kind, fields_sent))
