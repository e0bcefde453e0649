"""Threads of our own, values per thread, and whether gevent or eventlet has patched threads."""

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class DaemonThread(threading.Thread):
    """
    A thread of our own; the process ends without it.

    It inherits no context. Tracers hand on that of the caller, so all that a thread does from then
    on would be a part of the trace of the task that has happened to start it.
    """

    def __init__(self, name: str, target: Callable[..., object], *arguments: Any) -> None:
        super().__init__(target=target, name=name, args=arguments, daemon=True)

    def start(self) -> None:
        """Start it."""
        contextvars.Context().run(super().start)


class PerThread(Generic[T]):
    """
    A value per thread, created when the thread first reads it.

    gevent and eventlet may replace `threading.local` after this was created and read. From then
    on, each greenlet has its own value.

    Args:
        make: Creates the value.

    Attributes:
        made: The values, by the class that keeps them for the calling thread.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self.made: dict[type[threading.local], threading.local] = {}

    def __call__(self) -> T:
        """Return the value of the calling thread."""
        try:
            value: T = self.made[threading.local].value
        except (KeyError, AttributeError):
            mine = self.made.setdefault(threading.local, threading.local())
            value = mine.value = self._make()
        return value

    def forget(self) -> None:
        """Forget the values of all threads."""
        self.made = {}


def gevent_patched() -> bool:
    """Whether this process's threads are gevent's greenlets."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def eventlet_patched() -> bool:
    """Whether this process's threads are eventlet's greenlets."""
    patcher: Any = sys.modules.get("eventlet.patcher")
    return patcher is not None and bool(patcher.is_monkey_patched("thread"))


def greenlets_library() -> str:
    """Return the name of the library that has patched threads, or an empty string."""
    return "gevent" if gevent_patched() else "eventlet" if eventlet_patched() else ""
