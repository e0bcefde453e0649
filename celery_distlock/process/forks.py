"""
Forks and the end of the process: the one place where what belongs to one process is registered.

- `no_fork` keeps other threads from forking while one does what a child could not go on with. A
  worker's main process forks its pool's processes at any time, and kombu's pools and redis-py's
  have locks: one that a thread has at that moment stays locked in the child, which hangs at its
  first message to the broker, or, with redis-py 8, before its first task.
- `PerProcess` is a value that a forked child makes anew; `begin_anew` registers a callback. They
  are called in the order of `ForkStage`, and within a stage in the order of their registration.
- `at_exit` registers what is given a last moment at the end, in the order of `ExitStage`.
"""

import atexit
import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, TypeVar

__all__ = ["ExitStage", "ForkStage", "PerProcess", "at_exit", "begin_anew", "no_fork"]

logger = logging.getLogger(__name__)

# Seconds from when a thread began that a fork waits for it; then it is done all the same, and the
# child may hang.
PATIENCE = 0.25
_POLL = 0.001

T = TypeVar("T")
Callback = Callable[[], object]


class ForkStage(enum.IntEnum):
    """When something begins anew in a child: each stage may use what the stages before it made."""

    IDENTITY = enum.auto()  # random numbers, owners' names
    CONNECTIONS = enum.auto()  # sockets that are the parent's
    HOLDS = enum.auto()  # what the parent's threads hold
    THREADS = enum.auto()  # threads that do not run in the child
    TELEMETRY = enum.auto()  # what the parent has seen, and reports itself


class ExitStage(enum.IntEnum):
    """When something is finished at the end of the process: releases are still reported."""

    RELEASES = enum.auto()
    NOTIFICATIONS = enum.auto()


class PerProcess(Generic[T]):
    """
    A value of this process: made when it is first read, and again in a forked child.

    Not made before, because whoever imports us may have gevent put its own locks and threads in.

    Args:
        make: Makes the value. Two threads may both call it; one result is kept.
        stage: When a child forgets the parent's.
    """

    value: T

    def __init__(self, make: Callable[[], T], stage: ForkStage) -> None:
        self._make = make
        begin_anew(self.reset, stage)

    def __getattr__(self, name: str) -> Any:  # only of what is not there
        if name != "value":
            raise AttributeError(name)
        return self.__dict__.setdefault("value", self._make())

    @property
    def is_made(self) -> bool:
        """Whether the value has been read in this process."""
        return "value" in self.__dict__

    def reset(self) -> None:
        """Forget the value; the next read makes another."""
        self.__dict__.pop("value", None)


_in_child: dict[ForkStage, list[Callback]] = {stage: [] for stage in ForkStage}
_last: dict[ExitStage, list[Callback]] = {stage: [] for stage in ExitStage}
_busy: dict[int, float] = {}  # threads, by their identifiers, and until when a fork waits for them
_gate = threading.Lock()  # closed while somebody forks
_fork = threading.local()


def begin_anew(callback: Callback, stage: ForkStage) -> None:
    """Call *callback* in each child that this process forks. What it raises is logged."""
    _in_child[stage].append(callback)


def at_exit(callback: Callback, stage: ExitStage) -> None:
    """Call *callback* when the interpreter ends. What it raises is logged."""
    if not any(_last.values()):
        atexit.register(_call_all, _last)  # late, so that it is called before what was there
    _last[stage].append(callback)


def _call_all(stages: dict[Any, list[Callback]]) -> None:
    for stage in sorted(stages):
        for callback in stages[stage]:
            try:
                callback()
            except Exception:
                logger.exception("%r went wrong at %s", callback, stage.name.lower())


@contextmanager
def no_fork(patience: float | None = None) -> Iterator[None]:
    """Let no other thread fork in this block, for *patience* seconds at most; None: `PATIENCE`."""
    thread = threading.get_ident()
    outer = _busy.get(thread)  # who forks waits for that, and may have closed the gate
    with _gate if outer is None else nullcontext():
        until = time.monotonic() + (PATIENCE if patience is None else patience)
        _busy[thread] = max(until, outer or 0.0)
    try:
        yield
    finally:
        if outer is None:
            _busy.pop(thread, None)
        else:
            _busy[thread] = outer


def _before_fork() -> None:
    _fork.closed_gate = _gate.acquire(timeout=PATIENCE)
    until = max(_busy.copy().values(), default=0.0)
    while _is_busy() and time.monotonic() < until:
        time.sleep(_POLL)


def _is_busy() -> bool:
    """Whether a thread is in a block that may soon be left: one that hangs is not waited for."""
    here, now = threading.get_ident(), time.monotonic()
    return any(until > now for thread, until in _busy.copy().items() if thread != here)


def _after_in_parent() -> None:
    if _fork.closed_gate:
        _gate.release()


def _after_in_child() -> None:
    global _gate  # noqa: PLW0603  # who closed it may be no thread of the child's
    _gate = threading.Lock()
    _busy.clear()
    _call_all(_in_child)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
