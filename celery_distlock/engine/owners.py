"""
Track what each owner of this process holds: an asyncio task, or a thread (gevent: a greenlet).

Code that an asyncio event loop runs as a task acts for that task, all other code for its thread.
What an owner holds is counted here, so that a re-entry costs no round trip and cannot fail. A
task's entry is dropped with the task, a thread's with the thread; what is not released by then is
not renewed from then on.
"""

import asyncio
import collections
import contextlib
import threading
from asyncio import _get_running_loop
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary, ref

from celery_distlock.process.forks import ForkStage, PerProcess, at_fork
from celery_distlock.process.threads import PerThread, greenlets_library

from .hold import Hold

Holds: TypeAlias = dict[tuple[str, str], Hold]  # by store identity and key
AnyTask: TypeAlias = asyncio.Task[Any]

# After a fork these are the parent's: the forking thread's, and those of its loops' tasks.
_of_threads: PerThread[Holds] = PerThread(dict)
_of_tasks: "PerProcess[WeakKeyDictionary[AnyTask, Holds]]" = PerProcess(
    WeakKeyDictionary, ForkStage.HOLDS
)
at_fork(_of_threads.forget, ForkStage.HOLDS)


def current_task() -> AnyTask | None:
    """Return the asyncio task that this code runs in, or None."""
    if asyncio._get_running_loop() is None:  # the other functions raise where no loop runs
        return None
    task = asyncio.current_task()
    # The loop that asyncio reports as running may be another greenlet's.
    return None if task is None or greenlets_library() else task


def owner_here() -> tuple[AnyTask | None, Holds]:
    """Return the task as :func:`current_task` does, and its holds, or else this thread's."""
    if _get_running_loop() is None:
        try:  # as `_of_threads()` does, without a call: each step of a lock comes here
            return None, _of_threads.made[threading.local].value
        except (KeyError, AttributeError):
            return None, _of_threads()
    task = current_task()
    return task, held_by(task)


def held_here() -> Holds:
    """Return what this code's owner holds."""
    return held_by(current_task())


def held_by(task: AnyTask | None) -> Holds:
    """Return what *task* holds; None: this thread."""
    return _of_threads() if task is None else _of_tasks.value.setdefault(task, {})


def tasks_that_took(taker: object) -> list[AnyTask]:
    """Return the tasks that hold something that *taker* took."""
    alive = (task for each in _of_tasks.value.keyrefs() if (task := each()) is not None)
    return [task for task in alive if any(taker in hold.takers for hold in held_by(task).values())]


def is_held_by_other_task(task: AnyTask, identity: str, key: str) -> bool:
    """Return whether another task of *task*'s loop, which must not be blocked, has the key."""
    alive = (each() for each in _of_tasks.value.keyrefs())
    others = [each for each in alive if each is not None and each is not task]
    return any(
        each.get_loop() is task.get_loop() and not each.done() and (identity, key) in held_by(each)
        for each in others
    )


def hold_here(identity: str, key: str) -> Hold | None:
    """Return what this code has of a key, and may re-enter; or None."""
    task, holds = owner_here()
    hold = holds.get((identity, key))
    if hold is None and task is not None and (around := hold_around(identity, key)) is not None:
        return around if turns_of(around).may_take(task) else None
    return hold


def hold_around(identity: str, key: str) -> Hold | None:
    """
    Return what this thread holds outside the event loop that it runs, or None.

    It is held for as long as the loop runs, so a task that waited for it would wait for itself. The
    loop's tasks enter it instead, one at a time: see :class:`Turns`.
    """
    return held_by(None).get((identity, key))


class Turns:
    """
    Lets the tasks of a loop take turns under what the loop's thread holds around the loop.

    For code such as a locked task's body that calls :func:`asyncio.run`. All in the loop's thread.
    """

    def __init__(self) -> None:
        self._task: ref[AnyTask] | None = None
        self.depth = 0  # of the hold, without the entries of the task that has the turn
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    def ends(self, task: AnyTask | None, hold: Hold) -> bool:
        """Return whether *task* has the turn, and has left all of *hold* that it entered."""
        has_turn = task is not None and self._task is not None and self._task() is task
        return has_turn and hold.depth == self.depth

    def may_take(self, task: AnyTask) -> bool:
        """Whether *task* has the turn, or no live task has it."""
        other = None if self._task is None else self._task()
        if other is None or other is task:
            return True
        return other.done() or other.get_loop().is_closed()

    def take(self, task: AnyTask, hold: Hold) -> None:
        """Give the turn under *hold* to *task*, which may take it."""
        self.drop_dead(hold)
        self._task, self.depth = ref(task), hold.depth

    def drop_dead(self, hold: Hold) -> None:
        """Drop the unreleased entries of a task that had the turn and has ended."""
        if self._task is not None:
            self._task, hold.depth = None, self.depth

    def leave(self, task: AnyTask | None, hold: Hold) -> None:
        """End the turn of *task* under *hold*, if it has left the hold, which is then as before."""
        if self.ends(task, hold):
            self._task = None
            self._call_next()

    async def wait(self, timeout: float) -> None:
        """Return when it may be the caller's turn, or after *timeout* seconds."""
        loop = asyncio.get_running_loop()
        called: asyncio.Future[None] = loop.create_future()
        timer = loop.call_later(timeout, _call, called)
        self._waiting.append(called)
        try:
            await called
        except BaseException:
            self._call_next()  # this waiter may have been woken
            raise
        finally:
            timer.cancel()
            with contextlib.suppress(ValueError):
                self._waiting.remove(called)

    def _call_next(self) -> None:
        while self._waiting:
            called = self._waiting.popleft()
            if not called.done() and not called.get_loop().is_closed():
                called.set_result(None)
                return


def _call(called: "asyncio.Future[None]") -> None:
    if not called.done():
        called.set_result(None)


def end_turn(task: AnyTask | None, hold: Hold) -> None:
    """End the turn of *task* under *hold*, if it has one and has left all that it entered."""
    if hold.turns is not None:
        hold.turns.leave(task, hold)


def turns_of(hold: Hold) -> Turns:
    """Return the turns under *hold*."""
    if hold.turns is None:
        hold.turns = Turns()
    turns: Turns = hold.turns
    return turns
