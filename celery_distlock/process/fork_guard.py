"""
Keeps the process from forking while a thread of ours is at what a forked child cannot go on with.

A worker's main process forks its pool's processes at any time, and kombu's pools and redis-py's
have locks: one that a thread has at that moment stays locked in the child, which hangs at its first
message to the broker, or, with redis-py 8, before its first task.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_fork"]

# Seconds from when a thread began that a fork waits for it; then it is done all the same, and the
# child may hang.
PATIENCE = 0.25
_POLL = 0.001

_busy: dict[int, float] = {}  # threads, by their identifiers, and since when
_gate = threading.Lock()  # closed while somebody forks
_fork = threading.local()


@contextmanager
def no_fork() -> Iterator[None]:
    """Let no other thread fork in this block, but for a quarter of a second at most."""
    thread = threading.get_ident()
    with _gate:
        _busy[thread] = time.monotonic()
    try:
        yield
    finally:
        _busy.pop(thread, None)


def _wait() -> None:
    until = time.monotonic() + PATIENCE
    _fork.closed_gate = _gate.acquire(timeout=PATIENCE)
    while _is_busy() and time.monotonic() < until:
        time.sleep(_POLL)


def _is_busy() -> bool:
    """Whether a thread is in a block that may soon be left: one that hangs is not waited for."""
    here, since = threading.get_ident(), time.monotonic() - PATIENCE
    return any(began > since for thread, began in _busy.copy().items() if thread != here)


def _go_on() -> None:
    if _fork.closed_gate:
        _gate.release()


def _begin_anew() -> None:
    global _gate  # noqa: PLW0603  # who closed it may be no thread of the child's
    _gate = threading.Lock()
    _busy.clear()


os.register_at_fork(before=_wait, after_in_parent=_go_on, after_in_child=_begin_anew)
