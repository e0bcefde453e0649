"""
Celery events for what happens to locks: ``distlock-acquired``, ``distlock-parked``, ...

Sent where a worker sends events at all (``-E``, or ``celery control enable_events``), and by a
thread, so that a broker that is away holds up no task. An event has the name of a signal and its
arguments, besides ``task`` and ``uuid`` where it is about a task. They are in a group of their own:
one of ``task-`` is shown as the task's state. So there are two of these: ``task-parked``, and
``task-running`` when such a task has its key, as Celery's STARTED cannot follow another state.
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

__all__ = ["send", "set_source", "source"]

logger = logging.getLogger(__name__)

_STATES = {"task_parked": "task-parked", "task_woken": "task-running"}
QUIET = 5.0  # seconds for which nothing is sent after the broker did not take an event


class _Source(NamedTuple):
    """The worker whose events they are."""

    app: Celery
    nodename: str


class _Sender:
    """Sends events, by a connection that is made for the first one."""

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
        except Exception as error:  # noqa: BLE001  # a transport's own: whatever it is, it goes on
            logger.info(
                "no events about locks are sent for %g s, for the last one could not be: %s",
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


source: _Source | None = None  # of the events; None: none are sent
_sender = forks.PerProcess(_Sender, forks.ForkStage.TELEMETRY)  # the connection is the parent's
_notifier = BackgroundNotifier("distlock-events")


def set_source(app: Celery, nodename: str) -> None:
    """Send events from now on as the worker *nodename*; none at all if that is empty."""
    global source  # noqa: PLW0603  # a process is of one worker
    source = _Source(app, nodename) if nodename else None


def send(name: str, task: str, facts: Mapping[str, Any], *, with_state: bool = True) -> None:
    """
    Send the event for the signal *name*, if events are sent.

    *with_state*: the state is told as well, not for a task whose end Celery does not tell.
    """
    if (sending := source) is None:
        return
    fields = {**facts, "timestamp": time.time()}
    if task:
        fields |= {"task": task, "uuid": fields.pop("task_id", "")}
    events = {f"distlock-{name.partition('_')[2]}": fields}
    # What is parked on its arrival has had no task-received, with its name.
    if with_state and name in _STATES:
        events[_STATES[name]] = {**fields, "name": task}
    for kind, told in events.items():
        _notifier.submit(functools.partial(_sender.value.send, sending, kind, told))
