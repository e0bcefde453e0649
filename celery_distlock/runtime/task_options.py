"""The lock options that a task declares, and what was meant by names that are none."""

import inspect
import logging
from dataclasses import fields
from typing import Any

from celery_distlock.errors import ConfigurationError
from celery_distlock.key import Key
from celery_distlock.settings import APP_ONLY, TASK_ONLY, TASK_OPTIONS, meant

from .current import Task

__all__ = ["OPTIONS", "UNSET", "hint_for", "options_of", "take_call_options"]

logger = logging.getLogger(__name__)

UNSET: Any = type("Unset", (), {"__repr__": lambda _: "<not set>"})()
OPTIONS = (*TASK_OPTIONS, *TASK_ONLY)

# Without `shared`, which is also Celery's: a spawned pool process sets it as an attribute.
_TERMS = {each.name for each in fields(Key)[1:]} - {"shared"}
# What a name that is no option of ours is written as.
_WRITTEN = {
    **{name: f"lock_key=Key('a:{{sku}}', {name}=2.0)" for name in ("min_hold", "cooldown")},
    "capacity": "lock_key=Key('a:{sku}', capacity=5)",
    "weight": "lock_key=Key('a:{sku}', capacity=5, weight=2)",
    "shared": "lock_key=Key('a:{sku}', shared=True)",
    "rate": "lock_key=Key('a:{sku}', shared=True, rate='100/m')",
    "cost": "lock_key=Key('a:{sku}', shared=True, rate='100/m', cost=2)",
    **{name: f"lock_on_conflict={name!r}" for name in ("requeue", "retry", "skip", "fail")},
    "debounce": "lock_unique=Debounce(2.0)",
    "throttle": "lock_unique=Throttle(60.0)",
}


def options_of(task: type[Any], where: str) -> dict[str, Any]:
    """
    Return the lock options that *task*, its bases or annotations set.

    Raises:
        ConfigurationError: One of them is unknown; or has no ``lock_`` before it, and was given to
            the decorator. *where* names the task.
    """
    _refuse_without_prefix(task, where)
    options = {}
    for attribute in dir(task):
        name = attribute.removeprefix("lock_")
        if name == attribute:
            continue
        if name not in OPTIONS:
            known = [f"lock_{option}" for option in OPTIONS]
            hint = hint_for(name) or meant(attribute, known)
            raise ConfigurationError(f"{where}: unknown option {attribute}; {hint}")
        value = inspect.getattr_static(task, attribute)
        if isinstance(value, staticmethod):
            value = value.__func__
        if value is not UNSET:
            options[name] = value
    return options


def _refuse_without_prefix(task: type[Any], where: str) -> None:
    """Raise for an option of ours that the decorator of *task* was given without its prefix."""
    given = vars(task)
    if "_decorated" not in given:  # a class may have any attributes
        return
    if isinstance(given.get("on_failure"), str):
        raise ConfigurationError(
            f"{where}: on_failure is Celery's handler, a function; write lock_on_failure"
        )
    for attribute in given:
        name = attribute.removeprefix("distlock_")
        is_ours = name in OPTIONS or name in _TERMS or name != attribute
        if is_ours and not any(hasattr(base, attribute) for base in task.__bases__):
            raise ConfigurationError(
                f"{where}: {attribute} is no option of a task, and would change nothing;"
                f" {hint_for(name) or f'write lock_{name}'}. To have an attribute of that name,"
                " declare it in a base class"
            )


def hint_for(name: str) -> str:
    """Return what to write for *name*, without a prefix, which is no option; empty: not known."""
    if name in APP_ONLY:
        return f"distlock_{name} is a setting of the app"
    return f"write {_WRITTEN[name]}" if name in _WRITTEN else ""


def take_call_options(task: Task, options: dict[str, Any], *, by_celery: bool) -> tuple[Any, Any]:
    """
    Take the lock options out of those of one call.

    Returns:
        ``lock_via`` and ``lock_unique``.

    Raises:
        ConfigurationError: There is one that a call does not take, and the call is not made
            *by_celery*. An error would count as the end of the task that has this one as a link, or
            is retried: then it is only logged.
    """
    names = [name for name in options if name.startswith(("lock_", "distlock_"))]
    given = {name: options.pop(name) for name in names}
    via, unique = given.pop("lock_via", UNSET), given.pop("lock_unique", UNSET)
    words = ""
    if given:
        words = (
            f"a call does not take {', '.join(given)}; it takes lock_via='broker' or 'store', and"
            " lock_unique=None. All else is declared with the task"
        )
    elif unique is not UNSET and unique is not None:
        words = (
            f"of one call lock_unique can only be None, not {unique!r}; say the rule where the task"
            " is declared"
        )
        unique = UNSET
    if words and not by_celery:
        raise ConfigurationError(f"task {task.name}: {words}")
    if words:
        logger.error("task %s: %s", task.name, words)
    return via, unique
