"""
Other libraries for Celery, each in a module of its own, with a NAME and ``declare``.

What keeps a task from being queued twice: ``declare(app, url)`` returns a task that does nothing,
under a lock made from its argument. What has a rate: ``declare(app, start, limit)`` returns a task
that calls *start*, so often a second at most.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from celery import Celery

ONCE = ("singleton", "once")
WITH_RATES = ("heimdall",)


def declare_all(app: Celery, url: str) -> tuple[dict[str, Any], list[str]]:
    """Return the tasks by their libraries' names, and a line for each that cannot be imported."""
    return _declare(ONCE, app, url)


def declare_rates(
    app: Celery, start: Callable[[], None], limit: int
) -> tuple[dict[str, Any], list[str]]:
    """The same, of tasks with a rate."""
    return _declare(WITH_RATES, app, start, limit)


def _declare(names: tuple[str, ...], *given: Any) -> tuple[dict[str, Any], list[str]]:
    tasks, absent = {}, []
    for name in names:
        try:
            module = import_module(f"{__name__}.{name}")
        except ImportError as error:
            absent.append(f"celery-{name} is left out: {error}")
        else:
            tasks[module.NAME] = module.declare(*given)
    return tasks, absent
