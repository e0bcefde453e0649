"""Reports about locked tasks: log lines, signals, and states in the result backend."""

import contextvars
import logging
from collections.abc import Mapping
from typing import Any

from celery.backends.base import DisabledBackend
from celery.contrib.abortable import ABORTED, AbortableTask

from celery_distlock import clock, signals
from celery_distlock.naming import is_resting, shown, taken_by
from celery_distlock.stores import Store
from celery_distlock.stores.identities import task_id_of
from celery_distlock.stores.values import Reply, Status

from .current import Task

__all__ = ["PARKED", "Report", "TaskStates", "is_aborted", "parked_info"]

logger = logging.getLogger("celery_distlock.tasks")


class Report:
    """
    Logs and sends signals about one message for a task.

    Each log record has the task's name and id, and the facts in its text, as attributes as well:
    ``lock_task``, ``lock_task_id``, ``lock_key``, ... for log formatters that write JSON.
    """

    def __init__(self, task: Any, task_id: object, store: Store) -> None:
        self._task = task
        self._store = store
        self._task_id = str(task_id or "")
        self._context = contextvars.copy_context()
        self.name = f"{task.name}[{task_id}]" if task_id else str(task.name)

    def info(self, words: str, **facts: Any) -> None:
        """Log ``Task name[id]`` and *words*, a format string over *facts*."""
        self._log(logging.INFO, words, facts)

    def warning(self, words: str, error: BaseException | None = None, **facts: Any) -> None:
        """Log a warning as `info` does, with the traceback of *error*."""
        self._log(logging.WARNING, words, facts, error)

    def error(self, words: str, **facts: Any) -> None:
        """Log an error as `info` does."""
        self._log(logging.ERROR, words, facts)

    def _log(
        self, level: int, words: str, facts: dict[str, Any], error: BaseException | None = None
    ) -> None:
        if logger.isEnabledFor(level):
            facts = facts | {name: shown(facts[name]) for name in _MAY_BE_LONG & facts.keys()}
            attributes = {"task": self._task.name, "task_id": self._task_id, **facts}
            extra = {f"lock_{name}": _plain(value) for name, value in attributes.items()}
            # Passed as an argument, because a key may contain % signs.
            line = f"Task {self.name} {words.format_map(facts)}"
            logger.log(level, "%s", line, exc_info=error, extra=extra)

    def event(self, name: str, **facts: Any) -> None:
        """Send the signal *name* with *facts*, and log it: a loss as an error, most at debug."""
        if name in _INTERRUPTIONS:
            # A thread reports it that may have inherited the context of another task; a tracer
            # would ascribe the loss to that one.
            self._context.copy().run(self._interrupted, name, facts)
            return
        if logger.isEnabledFor(logging.DEBUG) and name in _DEBUG_LINES:
            self._log(logging.DEBUG, _DEBUG_LINES[name], facts)
        signals.send(name, self._task, self._store, task_id=self._task_id, **facts)

    def _interrupted(self, name: str, facts: dict[str, Any]) -> None:
        self._log(*_INTERRUPTIONS[name], facts)
        signals.send(name, self._task, self._store, task_id=self._task_id, **facts)

    def conflict(self, headers: Mapping[str, Any], key: str, reply: Reply) -> None:
        """Report that *key* is taken; warn of a deadlock if a parent of the task holds it."""
        self.event("lock_conflict", key=key, holder=reply.holder, remaining=reply.remaining)
        holder = task_id_of(reply.holder_run)
        if (
            holder
            and holder != headers.get("id")
            and holder in (headers.get("parent_id"), headers.get("root_id"))
        ):
            self.warning(
                "needs {key!r}, which its parent {holder} holds: if the parent waits for it, both"
                " wait for ever (a deadlock)",
                key=key,
                holder=holder,
            )

    def conflict_ended(self, words: str, key: str, reply: Reply, **facts: Any) -> None:
        """Log the outcome of a conflict as `info` does, with the reason why the key was taken."""
        facts = {"key": key, "holder": reply.holder, **facts}
        self.info(f"{words}: {{key!r}} {{why}}", why=_why(reply), **facts)

    def parking(
        self, key: str, reply: Reply, *, rated: bool = False, begun: bool = False, behind: str = ""
    ) -> None:
        """
        Report that the task is parked.

        Args:
            key: The key at which it is parked.
            reply: The store's answer.
            rated: The key has a rate.
            begun: A pool process has started the task, so Celery will log it as ignored.
            behind: A task of this worker that gets the key first, if it has no holder yet.
        """
        facts = {"key": key, "holder": reply.holder, "place": reply.place}
        line = f"{reply.place} ahead of it" if reply.place else "first in line"
        after = "; it runs when its turn comes, Celery ignores this attempt only" if begun else ""
        why = _why(reply, rated=rated, behind=behind)
        self.info(f"parked: {{key!r}} {{why}}; {line}{after}", why=why, **facts)
        self.event("task_parked", **facts)

    def deferred(self, key: str) -> None:
        """Report that this is a second delivery, which waits until the first has ended."""
        self.info("deferred: an earlier delivery of its message runs under {key!r}", key=key)


_MAY_BE_LONG = {"key", "holder"}
_INTERRUPTIONS = {
    "lock_lost": (logging.ERROR, "lost its lock {key!r} (token {token}): {reason}"),
    "lock_recalled": (logging.INFO, "is asked to leave {key!r} (token {token}): {by}"),
}
_DEBUG_LINES = {
    "lock_acquired": "acquired {key!r} (token {token}) after {waited:.3f} s",
    "lock_released": "released {key!r} (token {token}) after {held:.3f} s",
    "task_woken": "was woken and has acquired {key!r} after {waited:.3f} s",
}


def _why(reply: Reply, *, rated: bool = False, behind: str = "") -> str:
    """Return the reason why a task does not get its key now, for the end of a sentence."""
    if reply.status is Status.FULL:
        return "has a full queue"
    if reply.due and not is_resting(reply.holder):
        return f"opens{' by its rate' if rated else ''} in {reply.due:.1f} s"
    if reply.holder and not (rated and reply.place):
        return taken_by(reply.holder)
    if reply.place:
        return f"has earlier waiters{', and a rate' if rated else ''}"
    return f"goes first to {behind}" if behind else "admits no holder for now"


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float) else str(value)


PARKED = "PARKED"  # the state of a task that waits for its key


def parked_info(
    key: str, holder: str, place: int | None, wait: float | None
) -> dict[str, str | float | None]:
    """
    Return the info of the state ``PARKED``.

    Args:
        key: The key that is taken.
        holder: A holder, if there is one.
        place: The place in the queue; None: it waits with the broker.
        wait: Seconds until time alone opens the key to the task; None: that does not.
    """
    info: dict[str, str | float | None] = {"key": shown(key), "holder": shown(holder)}
    info["place"] = place
    return info if wait is None else {**info, "due": clock.wall() + wait}


class TaskStates:
    """Stores the states of the task that *request* is for, unless its results are ignored."""

    def __init__(self, task: Task, request: Any, report: Report) -> None:
        self._task = task
        self._request = request
        self._report = report

    def parked(self, key: str, holder: str, place: int | None, wait: float | None = None) -> None:
        """Store the state ``PARKED``, with the info that `parked_info` makes of the arguments."""
        if self._stores_results:
            self._store(PARKED, parked_info(key, holder, place, wait))

    def running(self) -> None:
        """Store the state ``STARTED`` for a task shown as parked, unless Celery does so itself."""
        if self._stores_results and not self._task.track_started:
            self._store("STARTED", None)

    def revoked(self, why: str) -> None:
        """Store the state ``REVOKED``, which fails a chord that waits for the task."""
        backend: Any = self._task.backend
        stores, request = self._stores_results, self._request
        backend.mark_as_revoked(request.id, why, request=request, store_result=stores)

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
        except Exception as error:  # noqa: BLE001  # only for display: the task must not fail
            words = "continues although its state {state} was not stored: {why}"
            self._report.warning(words, state=state, why=error)


def is_aborted(task: Any, identity: str) -> bool:
    """Whether a task is an `AbortableTask` of Celery and aborted, which is a stored state, too."""
    if not isinstance(task, AbortableTask) or isinstance(task.backend, DisabledBackend):
        return False
    return bool(task.AsyncResult(identity).state == ABORTED)
