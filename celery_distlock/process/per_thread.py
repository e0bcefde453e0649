"""Values per thread, or per greenlet where gevent or eventlet has patched threads."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(Generic[T]):
    """
    A value per thread, created when the thread first reads it.

    gevent and eventlet may replace `threading.local` after this was created and read. From then
    on, each greenlet has its own value.

    Args:
        make: Creates the value.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._made: dict[type[threading.local], threading.local] = {}

    def __call__(self) -> T:
        """Return the value of the calling thread."""
        try:
            value: T = self._made[threading.local].value
        except (KeyError, AttributeError):
            mine = self._made.setdefault(threading.local, threading.local())
            value = mine.value = self._make()
        return value

    def forget(self) -> None:
        """Forget the values of all threads."""
        self._made = {}
