"""Thread-local state of locked tasks: executions in progress, and holds not settled yet."""

import sys
from collections.abc import Callable
from types import CellType, FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from weakref import WeakSet

from celery import Task as _Task
from celery.app import trace

from celery_distlock.engine.hold import Hold
from celery_distlock.engine.lease import Lease
from celery_distlock.process.threads import PerThread

__all__ = ["Task", "UnderWay", "Unlocked", "hand_on", "here", "is_in_before_start", "lease_of"]

if TYPE_CHECKING:
    Task: TypeAlias = _Task[Any, Any]
else:
    Task = _Task  # takes parameters only from Celery 5.7 on


class UnderWay(Protocol):
    """A :class:`~celery_distlock.runtime.execution.Execution` that has begun."""

    task: Task

    @property
    def lease(self) -> Lease:
        """The lease on its keys."""

    def release(self) -> None:
        """Release all its keys; may be called again."""

    def hand_on(self) -> None:
        """Prepare for a retry, or raise :exc:`RecalledError`."""


class _Running:
    """
    The locked tasks of one thread.

    Attributes:
        stack: The executions under way, the innermost last.
        unlocked: The locked tasks that run without a lock, as declared or configured.
        unsettled: Holds of runs that have ended and whose results are not stored yet, each with
            the exception that was being handled where its task was called.
        called: The requests whose own call has reached `LockedTask.__call__`.
    """

    def __init__(self) -> None:
        self.stack: list[UnderWay] = []
        self.unlocked: tuple[Task, ...] = ()
        self.unsettled: list[tuple[Hold, BaseException | None]] = []
        self.called: WeakSet[Any] = WeakSet()

    @property
    def in_a_body(self) -> bool:
        """Whether a locked task runs in this thread: a call now has no message of its own."""
        return bool(self.stack or self.unlocked)

    def take_unsettled(self) -> list[tuple[Hold, BaseException | None]]:
        """Remove and return the holds that are not settled."""
        unsettled, self.unsettled = self.unsettled, []
        return unsettled


here = PerThread(_Running)  # here() is this thread's; with gevent, this greenlet's


def lease_of(task: Task) -> Lease:
    """Return the lease of the innermost execution of *task* in this thread."""
    execution = _innermost(task)
    if execution is not None:
        return execution.lease
    return Lease((), wanted=task not in here().unlocked)


def hand_on(task: Task) -> None:
    """
    Prepare the innermost execution of *task* in this thread for a retry.

    Raises:
        RecalledError: It is recalled, so it has no further attempt.
    """
    execution = _innermost(task)
    if execution is not None:
        execution.hand_on()


def _innermost(task: Task) -> UnderWay | None:
    return next((each for each in reversed(here().stack) if each.task is task), None)


class Unlocked:
    """An execution of *task* without a lock, as it is declared or configured."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def run(self, body: Callable[[], Any]) -> Any:
        """Run *body* and return its result."""
        running = here()
        before = running.unlocked
        running.unlocked = (*before, self._task)
        try:
            return body()
        finally:
            running.unlocked = before


def is_in_before_start(task: Task) -> bool:
    """Whether the task's `before_start` is running in this thread; Celery keeps no flag for it."""
    handler: Any = type(task).before_start
    if handler is Task.before_start:
        return False
    code = getattr(handler, "__code__", None)
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals is not vars(trace):  # the request begins there
        if frame.f_code is code and _runs(frame, handler):
            return True
        frame = frame.f_back
    return False


def _runs(frame: FrameType, function: Any) -> bool:
    """Whether *frame* runs *function*, and not another closure of the same decorator."""
    closed_over = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    return all(frame.f_locals.get(name) is _value(cell) for name, cell in closed_over)


def _value(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is empty
        return None
