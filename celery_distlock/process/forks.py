"""
Callbacks for forks and for the exit of the process, registered in one place.

- `no_fork` keeps other threads from forking during a block that would leave a child unusable. A
  worker's main process forks its pool's processes at any time, and the connection pools of kombu
  and redis-py have locks. A lock that another thread holds at that moment stays locked in the
  child, which then hangs at its first message to the broker or, with redis-py 8, before its first
  task.
- `PerProcess` is a value that a forked child re-creates; `at_fork` registers a callback. They
  are called in the order of `ForkStage`, and within a stage in the order of their registration.
- `at_exit` registers cleanup at the exit of the process, in the order of `ExitStage`.
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

logger = logging.getLogger(__name__)

# Longest delay of a fork, in seconds from when the other thread entered its block. After that the
# fork happens all the same, and the child may hang.
PATIENCE = 0.25
_POLL = 0.001

T = TypeVar("T")
Callback = Callable[[], object]


class ForkStage(enum.IntEnum):
    """Order of the callbacks in a forked child: a stage may use the results of earlier ones."""

    IDENTITY = enum.auto()  # random numbers, names of owners
    CONNECTIONS = enum.auto()  # sockets of the parent
    HOLDS = enum.auto()  # locks that the parent's threads hold
    THREADS = enum.auto()  # threads that do not exist in the child
    TELEMETRY = enum.auto()  # events that the parent reports itself


class ExitStage(enum.IntEnum):
    """Order of the callbacks at exit: releases come first, so that they are still reported."""

    RELEASES = enum.auto()
    NOTIFICATIONS = enum.auto()


class PerProcess(Generic[T]):
    """
    A value of this process: created when it is first read, and again in a forked child.

    It is not created at import time, because gevent may patch locks and threads after that.

    Args:
        make: Creates the value. Two threads may both call it; one result is kept.
        stage: The stage at which a child forgets the parent's value.
    """

    value: T

    def __init__(self, make: Callable[[], T], stage: ForkStage) -> None:
        self._make = make
        at_fork(self.reset, stage)

    def __getattr__(self, name: str) -> Any:  # called for missing attributes only
        if name != "value":
            raise AttributeError(name)
        return self.__dict__.setdefault("value", self._make())

    @property
    def is_made(self) -> bool:
        """Whether the value has been read in this process."""
        return "value" in self.__dict__

    def reset(self) -> None:
        """Forget the value; the next read creates another."""
        self.__dict__.pop("value", None)


_in_child: dict[ForkStage, list[Callback]] = {stage: [] for stage in ForkStage}
_last: dict[ExitStage, list[Callback]] = {stage: [] for stage in ExitStage}
_busy: dict[int, float] = {}  # until when a fork waits for a thread, by its identifier
_gate = threading.Lock()  # held while a thread forks
_fork = threading.local()


def at_fork(callback: Callback, stage: ForkStage) -> None:
    """Call *callback* in each forked child. What it raises is logged."""
    _in_child[stage].append(callback)


def at_exit(callback: Callback, stage: ExitStage) -> None:
    """Call *callback* when the interpreter exits. What it raises is logged."""
    if not any(_last.values()):
        atexit.register(_call_all, _last)  # atexit calls the last registered first
    _last[stage].append(callback)


def _call_all(stages: dict[Any, list[Callback]]) -> None:
    for stage in sorted(stages):
        for callback in stages[stage]:
            try:
                callback()
            except Exception:
                logger.exception("the callback %r failed at stage %s", callback, stage.name.lower())


@contextmanager
def no_fork(patience: float | None = None) -> Iterator[None]:
    """Delay forks by other threads during this block, for *patience* seconds (`PATIENCE`)."""
    thread = threading.get_ident()
    outer = _busy.get(thread)  # nested: a forking thread may hold the gate and wait for us
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
    """Whether another thread is in a `no_fork` block, and its time is not over yet."""
    here, now = threading.get_ident(), time.monotonic()
    return any(until > now for thread, until in _busy.copy().items() if thread != here)


def _after_in_parent() -> None:
    if _fork.closed_gate:
        _gate.release()


def _after_in_child() -> None:
    global _gate  # noqa: PLW0603  # its holder may not exist in the child
    _gate = threading.Lock()
    _busy.clear()
    _call_all(_in_child)


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_in_parent, after_in_child=_after_in_child
)
