"""
Libraries that keep a task from being queued twice, each in a module of its own.

Such a module has a NAME and ``declare(app, url)``, which returns a task that does nothing, under a
lock made from its argument.
"""

from importlib import import_module
from typing import Any

from celery import Celery

MODULES = ("singleton", "once")


def declare_all(app: Celery, url: str) -> tuple[dict[str, Any], list[str]]:
    """Return the tasks by their libraries' names, and a line for each that cannot be imported."""
    tasks, absent = {}, []
    for name in MODULES:
        try:
            module = import_module(f"{__name__}.{name}")
        except ImportError as error:
            absent.append(f"celery-{name} is left out: {error}")
        else:
            tasks[module.NAME] = module.declare(app, url)
    return tasks, absent
