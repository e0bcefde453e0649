"""The states of a task that waits for its keys, in the result backend."""

from typing import Any

from celery.backends.base import DisabledBackend
from celery.contrib.abortable import ABORTED, AbortableTask

from celery_distlock.naming import shown

from .current import Task
from .reporting import Report

__all__ = ["PARKED", "TaskStates", "is_aborted"]

PARKED = "PARKED"  # the state of a task that waits for its key


class TaskStates:
    """Stores the states of the task that *request* is for, unless its results are ignored."""

    def __init__(self, task: Task, request: Any, report: Report) -> None:
        self._task = task
        self._request = request
        self._report = report

    def parked(self, key: str, holder: str, place: int | None) -> None:
        """Store that the task waits for *key*, with *holder* and its *place* in the queue."""
        if self._stores_results:
            info = {"key": shown(key), "holder": shown(holder), "place": place}
            self._store(PARKED, info)

    def running(self) -> None:
        """Store that a task which was shown as parked runs now, unless Celery does so itself."""
        if self._stores_results and not self._task.track_started:
            self._store("STARTED", None)

    @property
    def _stores_results(self) -> bool:
        ignored = self._request.__dict__.get("ignore_result")
        return not (self._task.ignore_result if ignored is None else ignored)

    def _store(self, state: str, info: Any) -> None:
        identity: Any = self._request.id
        try:
            if is_aborted(self._task, identity):
                return
            self._task.backend.store_result(identity, info, state, request=self._request)
        except Exception as error:  # noqa: BLE001  # only a state to look at: the task matters more
            words = "goes on, though its state {state} was not stored: {why}"
            self._report.warning(words, state=state, why=error)


def is_aborted(task: Any, identity: str) -> bool:
    """Whether a task is one of Celery's `AbortableTask`, and aborted; that is a state, too."""
    if not isinstance(task, AbortableTask) or isinstance(task.backend, DisabledBackend):
        return False
    return bool(task.AsyncResult(identity).state == ABORTED)
