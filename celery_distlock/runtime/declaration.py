"""How a task is declared: the function and the ``__call__`` that Celery calls, and its bases."""

import contextlib
import functools
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter
from types import CellType, FunctionType, MethodType
from typing import Any

from celery import Celery
from celery.app import base as celery_base

from celery_distlock.errors import ConfigurationError
from celery_distlock.keys import AS_TEXT, Arguments, KeyRule
from celery_distlock.rate import Rate

from .current import Task

__all__ = ["TaskFunction", "Validation", "declared_names", "detour", "refuse_strategy"]

_RUN = "_distlock_run"  # among a task class's attributes
_WRAPPERS = (vars(contextlib), vars(functools))  # their wrappers pass all arguments on
_RUNS = re.compile("^run|sync|await")  # names in code that runs a coroutine

_KINDS = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
    "a generator function": inspect.isgeneratorfunction,
}
_ASYNC_WAY = (
    "declare a plain function with the body asyncio.run(...), which holds the key until the"
    " coroutine has ended; or declare the task without LockedTask, and use AsyncLock in it"
)
_GENERATOR_WAY = "declare a plain function that does the work, or returns list(...) of it"


class TaskFunction:
    """
    The function of a task, as Celery calls it.

    If a decorator has wrapped it, this is the wrapper, which may add and remove arguments. Wrappers
    of the standard library, and Celery's own for Pydantic, pass their arguments on, so the function
    inside counts.
    """

    def __init__(self, task: type[Any], name: str) -> None:
        self._task = name
        self._typed = task.typing is not False
        run = _declared_run(task)
        called: Any = run.__get__(object(), task) if hasattr(type(run), "__get__") else run
        self._bound = inspect.ismethod(called)
        self._function: Any = called.__func__ if self._bound else called
        self._validated = Validation.is_made_by(self._function)

    def key_rule(self, rule: Any, *, option: str = "lock_key", rate: Rate | None = None) -> KeyRule:
        """
        Return the rule that makes keys from the task's arguments, from *rule*, its *option*.

        Raises:
            ConfigurationError: See `KeyRule`.
        """
        signature, validate = self._signature(), None
        if self._validated:
            validate = Validation(self._function, f"task {self._task}", bound=self._bound)
        try:
            made = KeyRule(
                rule,
                task=self._task,
                signature=signature,
                validate=validate,
                any_keywords=not self._typed,
                rate=rate,
                option=option,
            )
        except ConfigurationError as error:
            raise ConfigurationError(f"{error}{self._on_wrappers(signature)}") from error.__cause__
        if made.compares_calls:
            self.ensure_calls_compare(f"{{digest}} in {option}")
        return made

    def ensure_calls_compare(self, what: str) -> None:
        """
        Raise if the same arguments, by position or by keyword, would differ for *what*.

        Raises:
            ConfigurationError: A wrapper takes any arguments for a function that names them.
        """
        signature = self._signature()
        hint = self._on_wrappers(signature)
        if not hint or not {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= _kinds(signature):
            return
        wrapped = self._seen_by_callers(_inner(self._function), follow_wrapped=True)
        if Parameter.POSITIONAL_OR_KEYWORD in _kinds(wrapped):
            raise ConfigurationError(
                f"task {self._task}: {what} compares all arguments, and would treat the same ones"
                f" by position and by keyword as different{hint}"
            )

    def _signature(self) -> inspect.Signature:
        # Celery's wrapper for Pydantic binds arguments by the signature of what it wraps.
        return self._seen_by_callers(_inner(self._function), follow_wrapped=self._validated)

    def _seen_by_callers(self, function: Any, *, follow_wrapped: bool) -> inspect.Signature:
        """Return the signature of *function*, without the task."""
        if self._bound:
            function = MethodType(function, object())
        try:
            return inspect.signature(function, follow_wrapped=follow_wrapped, **AS_TEXT)
        except ValueError as error:
            raise ConfigurationError(
                f"task {self._task}: its function has no known signature: {error}"
            ) from error

    def _on_wrappers(self, signature: inspect.Signature) -> str:
        function = _inner(self._function)
        if not hasattr(function, "__wrapped__") or self._validated:
            return ""
        return (
            f"; its parameters are {signature}, those of a decorator's wrapper around"
            f" {_name(function)}: if the wrapper passes its arguments on, let the decorator set"
            " wrapper.__signature__ = inspect.signature(function); else lock_key may be a"
            " callable that takes the arguments as they are sent"
        )

    def ensure_ends_with_its_call(self) -> None:
        """Raise :exc:`ConfigurationError` if the body runs only after the function has returned."""
        function = _inner(self._function)
        while isinstance(function, functools.partial):
            function = function.func
        if kind := _kind(function):
            raise ConfigurationError(
                f"task {self._task}: {_name(function)} is {kind}: its body runs after the call"
                " has returned, so the key would be released before; "
                f"{_ASYNC_WAY if 'async' in kind or 'coroutine' in kind else _GENERATOR_WAY}"
            )

    @property
    def seems_pending(self) -> bool:
        """Whether it seems to return a coroutine: it wraps one, and nothing there runs it."""
        wrappers = list(_wrappers(self._function))
        inner = wrappers.pop()
        is_async = inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner)
        return is_async and not any(map(_may_run, wrappers))


def _declared_run(task: type[Any]) -> Any:
    """Return the ``run`` of *task* as declared; a monitoring agent may have replaced it since."""
    if _RUN not in vars(task):
        setattr(task, _RUN, inspect.getattr_static(task, "run"))
    return vars(task)[_RUN]


def _inner(function: Any) -> Any:
    while _hands_on(function):
        function = function.__wrapped__
    return function


def _hands_on(function: Any) -> bool:
    made_in = getattr(function, "__globals__", None)
    known = any(made_in is each for each in _WRAPPERS) or Validation.is_made_by(function)
    return known and hasattr(function, "__wrapped__")


def _wrappers(function: Any) -> Iterator[Any]:
    """Yield *function* and what it wraps, the innermost last."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _may_run(wrapper: Any) -> bool:
    code = getattr(wrapper, "__code__", None)
    return code is None or any(map(_RUNS.search, (*code.co_names, *code.co_freevars)))


def _kinds(signature: inspect.Signature) -> set[Any]:
    return {parameter.kind for parameter in signature.parameters.values()}


def _kind(function: Any) -> str:
    """Return the kind of a function whose call does not run its body; empty for others."""
    call = inspect.getattr_static(type(function), "__call__", None)  # of an object
    kinds = (kind for kind, is_one in _KINDS.items() if is_one(function) or is_one(call))
    return next(kinds, "")


def _name(function: Any) -> str:
    found = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    return str(found or repr(function))


class Validation:
    """
    Validates arguments as Celery's wrapper around a task's function does.

    The wrapper validates and calls in one step. So a copy of it is made around a function that
    returns its arguments.

    Args:
        wrapper: Celery's wrapper around the task's function.
        bound: Whether the function has the task as its first parameter.
        where: The task's name, for messages.

    Raises:
        ConfigurationError: This Celery's wrapper is not like those of 5.5 to 5.7.
    """

    def __init__(self, wrapper: FunctionType, where: str, *, bound: bool) -> None:
        code, cells = wrapper.__code__, wrapper.__closure__ or ()
        if "task_fun" not in code.co_freevars:
            raise ConfigurationError(
                f"{where}: the Pydantic validation of this version of Celery is not supported; use"
                " a supported version, or pydantic=False"
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
        return getattr(function, "__globals__", None) is vars(celery_base)

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments:
        """
        Return the arguments with models in place of dictionaries of their fields.

        Raises:
            pydantic.ValidationError: They are invalid; calling the task would raise the same.
        """
        validated, named = self._validate(*self._before, *args, **kwargs)
        return validated[len(self._before) :], named


def _arguments(*args: Any, **kwargs: Any) -> Arguments:
    return args, kwargs


def declared_names(task: type[Any], app: Celery) -> list[str]:
    """Return the names under which *app* has tasks of this class; none: it is a base of others."""
    name: str | None = task.name
    if name is not None and getattr(task, "_decorated", False):
        return [name]
    # `register_task` takes instances, and names those whose class has no name. Not `app.tasks`,
    # which declares all tasks that are still pending.
    registered: Mapping[str, Any] = app._tasks  # type: ignore[attr-defined]
    names = [each.name for each in list(registered.values()) if type(each) is task]
    return names or ([] if name is None else [name])


def refuse_strategy(task: type[Any], name: str, ours: type[Any]) -> None:
    """Raise if a base of *task* but *ours* receives its messages in another way than one by one."""
    for each in task.__mro__:
        if each not in (ours, Task) and "Strategy" in vars(each):
            raise ConfigurationError(
                f"task {name}: the Strategy of {each.__qualname__} receives messages past the lock,"
                " as that of celery-batches does; declare the task without LockedTask, and take the"
                " key in its body: with Lock(...): ..."
            )


def detour(task: type[Any], name: str, ours: type[Any]) -> str:
    """
    Return which class of *task*, before *ours*, has a ``__call__`` that seems to take no lock.

    Empty: none.

    Raises:
        ConfigurationError: That class is not a `LockedTask`, comes before it, and runs the task.
    """
    detours = list(_detours(task, ours))
    for base in detours:
        if not issubclass(base, ours) and "run" in _code_of(base).co_names:
            raise ConfigurationError(
                f"task {name}: the __call__ of {base.__qualname__} comes before LockedTask's"
                " and does not call it, so the task would run without its lock; put LockedTask"
                f" first, as in class Base(LockedTask, {base.__name__}), or have that __call__"
                " return super().__call__(*args, **kwargs)"
            )
    return detours[0].__qualname__ if detours else ""


def _detours(task: type[Any], ours: type[Any]) -> Iterator[type[Any]]:
    for base in task.__mro__[: task.__mro__.index(ours)]:
        code = _code_of(base)
        # What it calls is known only when it runs; that it cannot call super() is known now.
        if code and "__class__" not in code.co_freevars and "__call__" not in code.co_names:
            yield base


def _code_of(base: type[Any]) -> Any:
    """Return the code of a class's own ``__call__``; None: it has none, or an agent replaced it."""
    call = vars(base).get("__call__")
    code = getattr(inspect.unwrap(call), "__code__", None) if call else None
    return code if code is not None and code.co_name == "__call__" else None
