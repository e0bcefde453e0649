"""Lets woken tasks be the next that a prefork pool begins, before others that wait for a slot."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Precedence"]


class Precedence:
    """
    The order in which a worker's tasks begin, as far as it can be changed.

    A woken task came before those that were fetched since, and its key is idle until it runs; so it
    goes before what waits for a slot, but not before others that were woken. For the event loop:
    where there is none (threads, gevent, solo), tasks begin as the pool was given them.
    """

    def __init__(self, controller: Any) -> None:
        # kombu has no name of its own for it; without it, a woken task goes last, as others do.
        semaphore = getattr(controller, "semaphore", None)
        self._waiting: deque[Any] | None = getattr(semaphore, "_waiting", None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the one task that is given to the pool in this block go before."""
        waiting = self._waiting
        before = len(waiting) if waiting is not None else 0
        yield
        if waiting is not None and len(waiting) == before + 1:
            self._put_first(waiting)

    def _put_first(self, waiting: deque[Any]) -> None:
        task = _Woken(waiting.pop())
        place = next(
            (n for n, each in enumerate(waiting) if type(each) is not _Woken), len(waiting)
        )
        waiting.insert(place, task)


class _Woken(tuple[Any, ...]):
    """What waits for a slot, marked."""

    __slots__ = ()
