"""What Celery does with the errors of a task that does not get its key."""

from typing import Any

from celery.app.autoretry import add_autoretry_behaviour

from celery_distlock.errors import LockConflictError

from .current import Task

__all__ = ["expect_conflicts", "fail"]


def expect_conflicts(task: type[Any]) -> None:
    """Have Celery log a conflict of *task* in one line, as an error that was expected."""
    throws = task.throws if isinstance(task.throws, tuple) else (task.throws,)
    if LockConflictError not in throws:
        task.throws = (*throws, LockConflictError)


def fail(task: Task, error: Exception) -> None:
    """
    Fail the execution of *task* with *error*, which came before its body.

    Raises:
        Retry: ``autoretry_for`` names the error, as for one that the body raises.
        Exception: *error* itself.
    """
    attempt = _Attempt(task, error)
    add_autoretry_behaviour(attempt)
    attempt.run()


class _Attempt:
    """Looks like *task* to Celery's automatic retries; its body has raised *error*."""

    def __init__(self, task: Task, error: Exception) -> None:
        self._task = task
        self._error = error

    def __getattr__(self, name: str) -> Any:
        if name == "_orig_run":  # Celery has given the task automatic retries, and not yet this
            raise AttributeError(name)
        return getattr(self._task, name)

    def __delattr__(self, name: str) -> None:
        delattr(self._task, name)

    def run(self) -> None:
        raise self._error
