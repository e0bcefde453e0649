"""
Find where an event loop keeps an exception that is thrown into the thread that runs it.

If a callback raises, or a task that is not awaited, asyncio keeps the exception and goes on with
the rest. An exception that must reach the code around the loop has to cancel the task for which the
loop is run.
"""

import asyncio
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeAlias

from celery_distlock.process.forks import ForkStage, PerProcess

Main: TypeAlias = asyncio.Future[Any]

_COLLECTS = sys.version_info[:2] == (3, 11)
# Held while the garbage collector is off.
_looking = PerProcess(threading.RLock, ForkStage.IDENTITY)

# By name: an agent that monitors asyncio replaces the functions, and calls them.
_RUNS_A_TASK = ("run_until_complete", asyncio.AbstractEventLoop)
_RUNS_A_STEP = ("_run", asyncio.Handle)
_RUNS_ANY_LOOP = ("run", asyncio.Runner)  # that of asyncio.run, and of uvloop.run


def frame_of(thread: int) -> FrameType | None:
    """
    Return the frame that *thread* is in.

    Python 3.11 may collect garbage while it has its list of threads locked for this (CPython's
    gh-106883). A finalizer that then waits for another thread to start one would block both for
    ever.
    """
    if not _COLLECTS:
        return sys._current_frames().get(thread)
    with _looking.value:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(thread)
        finally:
            if collects:
                gc.enable()


def task_of_loop(
    innermost: FrameType | None,
    is_outermost: Callable[[FrameType], bool],
    *,
    always: bool = False,
) -> Main | None:
    """
    Return the task that a loop is run for, if the loop would keep an exception in *innermost*.

    Only loops that are run inside the outermost frame count. None: there is no such loop; or it
    waits for something to do, or runs a step of that very task, so that the exception ends it,
    unless *always*. A loop that is not Python code, such as uvloop's, keeps it also while it waits.
    """
    in_step = always
    for frame in _frames(innermost, is_outermost):
        in_step = in_step or _is_in(frame, *_RUNS_A_STEP)
        if _is_in(frame, *_RUNS_A_TASK):
            return _task_to_end(frame.f_locals.get("future"), always) if in_step else None
        if _is_in(frame, *_RUNS_ANY_LOOP):
            return _task_to_end(frame.f_locals.get("task"), always)
    return None


def wake_loop(innermost: FrameType | None, is_outermost: Callable[[FrameType], bool]) -> None:
    """Wake the loop that waits in *innermost*, if any: nothing can be raised in C code."""
    for frame in _frames(innermost, is_outermost):
        if _is_in(frame, *_RUNS_A_TASK):
            with contextlib.suppress(RuntimeError):  # the loop was closed in between
                frame.f_locals["self"].call_soon_threadsafe(_go_on)
            return


def _is_in(frame: FrameType, method: str, kind: type[Any]) -> bool:
    """Whether *frame* runs the method of this name of an object of this kind."""
    return frame.f_code.co_name == method and isinstance(frame.f_locals.get("self"), kind)


def _frames(
    innermost: FrameType | None, is_outermost: Callable[[FrameType], bool]
) -> Iterator[FrameType]:
    """Yield the frames inside the outermost one, innermost first."""
    frame = innermost
    while frame is not None and not is_outermost(frame):
        yield frame
        frame = frame.f_back


def _go_on() -> None:
    """Do nothing: the pending exception is raised on the way here."""


def _task_to_end(main: object, always: bool) -> Main | None:
    """Return what a loop must complete, unless it runs a step of that very task now."""
    if not isinstance(main, asyncio.Future):
        return None
    loop = main.get_loop()
    if not loop.is_running() or (asyncio.current_task(loop) is main and not always):
        return None
    return main
