"""What each thread has of its own, or each greenlet where those stand for threads."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["PerThread"]

T = TypeVar("T")


class PerThread(Generic[T]):
    """
    A value of each thread: made when the thread first reads it.

    gevent and eventlet may replace `threading.local` after this was made, and read: from then on,
    each greenlet has a value.

    Args:
        make: Makes the value.
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
