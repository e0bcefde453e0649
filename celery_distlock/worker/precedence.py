"""
Starts woken tasks first: moves them ahead in the queue for slots of a prefork pool.

- A woken task goes before tasks that were not woken: it came before them, and its key is idle until
  it runs.
- It never goes before another woken task.
- Without an event loop (threads, gevent, solo) tasks begin in the order in which the pool got them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Precedence"]


class Precedence:
    """
    A context manager: the one task that is given to the pool within it goes ahead.

    For the event loop of the worker's main process.
    """

    def __init__(self, controller: Any) -> None:
        # kombu has no name of its own for it; without it, a woken task goes last, as others do.
        semaphore = getattr(controller, "semaphore", None)
        self._waiting: deque[Any] | None = getattr(semaphore, "_waiting", None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Let the one task that is given to the pool in this block go ahead."""
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
    """A woken task that waits for a slot."""

    __slots__ = ()
