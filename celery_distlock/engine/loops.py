"""
Where an event loop keeps an exception that is thrown into the thread that runs it.

What a callback raises, or a task that nobody awaits, asyncio keeps, and goes on with the rest. What
has to reach the code around the loop must be told to the task for which the loop is run.
"""

import asyncio
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

__all__ = ["Main", "task_beside"]

Main: TypeAlias = asyncio.Future[Any]

_RUNS_A_TASK = asyncio.BaseEventLoop.run_until_complete.__code__
_RUNS_A_STEP = asyncio.Handle._run.__code__


def task_beside(
    innermost: FrameType | None, is_outermost: Callable[[FrameType], bool]
) -> Main | None:
    """
    Return the task that a loop is run for, where the loop would keep an exception in *innermost*.

    Only loops that are run inside of the outermost frame count. None: there is none; or it waits
    for something to do, or does a step of that very task, and the exception ends it.
    """
    frame, in_step = innermost, False
    while frame is not None and not is_outermost(frame):
        in_step = in_step or frame.f_code is _RUNS_A_STEP
        if frame.f_code is _RUNS_A_TASK:
            return _main_task(frame) if in_step else None
        frame = frame.f_back
    return None


def _main_task(runs: FrameType) -> Main | None:
    """Return what *runs* is to complete, unless that is the task that it does a step of."""
    loop, main = runs.f_locals["self"], runs.f_locals["future"]
    if not isinstance(main, asyncio.Future) or asyncio.current_task(loop) is main:
        return None
    return main
