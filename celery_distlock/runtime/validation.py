"""The arguments of a task with ``pydantic=True`` as its function gets them, for its key."""

from collections.abc import Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

from celery.app import base

from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import Arguments

__all__ = ["Validation"]


class Validation:
    """
    Validates arguments as Celery's wrapper around a task's function does.

    The wrapper validates and calls in one breath. So it is made once more, around a function that
    returns what it is called with.

    Args:
        wrapper: What Celery has made of the task's function.
        bound: Whether that has the task as its first parameter.
        where: Names the task, for messages.

    Raises:
        ConfigurationError: This Celery's wrapper is not like those of 5.5 to 5.7.
    """

    def __init__(self, wrapper: FunctionType, where: str, *, bound: bool) -> None:
        code, cells = wrapper.__code__, wrapper.__closure__ or ()
        if "task_fun" not in code.co_freevars:
            raise ConfigurationError(
                f"{where}: how this version of Celery validates by Pydantic is not known here; use"
                " one that is supported, or pydantic=False"
            )
        closure = tuple(
            CellType(_arguments) if name == "task_fun" else cell
            for name, cell in zip(code.co_freevars, cells, strict=True)
        )
        self._validate = FunctionType(code, wrapper.__globals__, closure=closure)
        self._before = (None,) if bound else ()

    @staticmethod
    def is_made_by(function: Any) -> bool:
        """Whether *function* is Celery's wrapper, and not the user's function."""
        return getattr(function, "__globals__", None) is vars(base)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """
        Return the arguments with models in the place of what is one's fields.

        Raises:
            pydantic.ValidationError: They are wrong; calling the task would raise the same.
        """
        validated, named = self._validate(*self._before, *args, **kwargs)
        return validated[len(self._before) :], named


def _arguments(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs
