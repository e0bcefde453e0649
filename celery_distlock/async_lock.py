"""`AsyncLock`: the lock that locked tasks take, for coroutines."""

import asyncio
import math
import sys
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Literal

from . import clock
from .engine import async_acquisition
from .engine.hold import Hold, HoldState
from .engine.key_locks import KeyLock, report_conflict
from .engine.lease import Lease
from .engine.owners import (
    AnyTask,
    current_task,
    end_turn,
    held_by,
    hold_around,
    tasks_that_took,
    turns_of,
)
from .engine.task_holds import LossNotice, TaskHold
from .engine.upgrading import conflict, wants_upgrade
from .errors import ConfigurationError, LockLostError, LockNotOwnedError
from .key import UNSAID, Key
from .naming import shown
from .process.threads import greenlets_library
from .rate import RateLike
from .settings import closest
from .stores import Store
from .stores.values import Reply, Status

__all__ = ["AsyncLock"]

ON_LOST = ("cancel", "warn")
TURN = 1.0  # seconds after which a waiter checks whether the task that has the turn is alive


class AsyncLock(KeyLock):
    """
    The lock that locked tasks and :class:`~celery_distlock.Lock` take, for coroutines.

    ::

        async with AsyncLock(f"stock:{sku}", timeout=2.0) as lease:
            ...

    Reentrant, and owned by the :class:`asyncio.Task` that calls :meth:`acquire`: a task that it
    starts is another owner, and so is a thread. One object serves any number of tasks, threads and
    event loops. Waiters need no thread each, and share one queue with tasks and `Lock`: first come,
    first served. A task that is cancelled while it acquires, waits or releases leaves nothing
    behind.

    If a thread runs an event loop while it holds the key itself (a locked task that calls
    :func:`asyncio.run`), the loop's tasks enter that hold, one at a time.

    Args:
        key: As for :class:`~celery_distlock.Lock`.
        capacity: As for :class:`~celery_distlock.Lock`.
        weight: As for :class:`~celery_distlock.Lock`.
        shared: As for :class:`~celery_distlock.Lock`.
        rate: As for :class:`~celery_distlock.Lock`.
        lease: As for :class:`~celery_distlock.Lock`. It is renewed by a thread, however busy the
            event loop is, until the task has ended or the loop is closed.
        watchdog: Renew the lease while it is held. False: a fixed lease, never renewed.
        store: As for :class:`~celery_distlock.Lock`.
        prefix: As for :class:`~celery_distlock.Lock`.
        timeout: Seconds that ``async with`` waits for the holder at most; None waits for ever.
        on_lost: What happens to the task if it loses the lock while it holds it. ``"cancel"``: the
            task is cancelled, and the end of ``async with``, or :meth:`release`, turns that into
            :exc:`~celery_distlock.errors.LockLostError`. ``"warn"``: the loss is logged and
            signalled, and the end raises the same error.

    Raises:
        ConfigurationError: An argument is of the wrong type or out of range; or gevent or eventlet
            has patched this process, where asyncio and its threads cannot run concurrently.
    """

    def __init__(
        self,
        key: str | Key,
        *,
        capacity: int | None = UNSAID,
        weight: int = 1,
        shared: bool = False,
        rate: RateLike | None = None,
        lease: float = 30.0,
        watchdog: bool = True,
        store: Store | str | None = None,
        prefix: str | None = None,
        timeout: float | None = None,
        on_lost: Literal["cancel", "warn"] = "cancel",
    ) -> None:
        super().__init__(
            key,
            capacity=capacity,
            weight=weight,
            shared=shared,
            rate=rate,
            lease=lease,
            watchdog=watchdog,
            store=store,
            prefix=prefix,
            timeout=timeout,
        )
        if on_lost not in ON_LOST:
            known = f"one of {', '.join(ON_LOST)}"
            hint = closest(on_lost, ON_LOST) if isinstance(on_lost, str) else known
            raise ConfigurationError(f"on_lost cannot be {on_lost!r}: {hint}")
        if library := greenlets_library():
            raise ConfigurationError(
                f"AsyncLock() is for asyncio, and {library} has patched this process; use Lock()"
            )
        self._cancels = on_lost == "cancel"

    def acquire(self, timeout: float | None = None) -> Coroutine[Any, Any, bool]:
        """
        Take the lock; waiters are served first come, first served.

        The task that calls this is the owner, even if another one awaits it, as in
        ``asyncio.wait_for(lock.acquire(), 2.0)`` with Python 3.11.

        Args:
            timeout: Seconds to wait for the holder at most; None waits for ever, 0 not at all. A
                server that hangs is given up at most 16 seconds later.

        Returns:
            Whether the lock is held now.

        Raises:
            ValueError: *timeout* is not a number, or negative.
            RuntimeError: It is not called in an asyncio task.
            LockLostError: This task held the lock already and has lost it.
            LockConflictError: As for :meth:`celery_distlock.Lock.acquire`.
            StoreUnavailableError: The store did not answer; the lock is not held.
            QuorumError: Too few of several servers have confirmed it; the lock is not held.
            asyncio.CancelledError: The lock is not held; what the store may have granted is
                released in the background.
        """
        return self._is_acquired(_this_task(), _patience(timeout))

    def release(self) -> Coroutine[Any, Any, None]:
        """
        Undo one :meth:`acquire`; the lock is free after the last.

        If it is cancelled, the lock is still released, in the background.

        Raises:
            LockNotOwnedError: This task does not hold the lock.
            LockLostError: This task held the lock and has lost it; another holder may have run
                since. If other code cancelled the task as well, that cancellation goes on instead.
        """
        return self._release(_this_task())

    async def locked(self) -> bool:
        """Return whether the lock has a holder at this moment; one round trip."""
        store = self._store
        state = await async_acquisition.call(store, lambda: store.inspect(self.key))
        return bool(state.token)

    async def __aenter__(self) -> Lease:
        """
        Wait for the lock, at most `timeout` seconds if that was given; return the lease.

        Raises :exc:`~celery_distlock.errors.LockConflictError` if there is still another holder
        then.
        """
        task = _this_task()
        reply = await self._acquire(task, self._timeout)
        if reply is not None:
            raise conflict(self.key, reply)
        holds = held_by(task)
        store, _ = self._look(holds)
        return Lease((holds[store.identity, self.key],))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release; raise the loss of the lock unless the body raises something itself."""
        if kind is GeneratorExit and not (taken_by := tasks_that_took(self)):
            return  # discarded like its task: nothing can be awaited, and the lease ends
        task = _this_task()
        if kind is GeneratorExit and task not in taken_by:  # a generator that another task left
            raise LockNotOwnedError(f"lock {shown(self.key)!r} was taken by another task")
        hold = self._leave(task, held_by(task))
        if hold.depth:
            await _leave(hold, task)
            return
        ours, loss = await _give_back(hold, succeeded=error is None)
        if loss is not None and (error is None or (ours and _is_cancellation(error))):
            raise loss from error

    async def _is_acquired(self, task: AnyTask, patience: float | None) -> bool:
        reply = await self._acquire(task, patience)
        if reply is not None and reply.status is Status.DEADLOCK and patience is None:
            raise conflict(self.key, reply)
        return reply is None

    async def _acquire(self, task: AnyTask, patience: float | None) -> Reply | None:
        """Return the store's answer if the lock is not held now."""
        deadline = math.inf if patience is None else clock.monotonic() + patience
        store, hold = self._enter(task, held_by(task))
        while hold is None:
            around = hold_around(store.identity, self.key)
            if around is None:
                return await self._ask(store, task, patience)
            left = deadline - clock.monotonic()
            if left <= 0:
                holder, remaining = around.owner, around.remaining
                return Reply(Status.BUSY, 0.0, holder=holder, remaining=remaining)
            await turns_of(around).wait(min(left, TURN))
            store, hold = self._enter(task, held_by(task))
        if not wants_upgrade(hold, self._want):
            return None
        left_over = None if patience is None else max(0.0, deadline - clock.monotonic())
        return await self._upgrade(hold, task, left_over)

    async def _upgrade(self, hold: Hold, task: AnyTask, patience: float | None) -> Reply | None:
        """Upgrade what was entered; if that fails, leave it again and return the reason."""
        reply = None
        try:
            reply = await async_acquisition.upgrade(hold, timeout=patience)
        finally:
            if reply is None or reply.status is not Status.GRANTED:
                self._leave(task, held_by(task))
                end_turn(task, hold)
        if reply.status is Status.GRANTED:
            hold.upgraded_at = hold.depth - 1
            return None
        await async_acquisition.report_in_thread(hold.store, lambda: report_conflict(hold, reply))
        return reply

    async def _ask(self, store: Store, task: AnyTask, patience: float | None) -> Reply | None:
        hold = self._new_hold(store, task)
        reply = await async_acquisition.acquire(hold, timeout=patience)
        # Record a grant before anything is awaited; a cancellation would leave it without an owner.
        if reply.status is not Status.GRANTED:
            await async_acquisition.report_in_thread(store, lambda: report_conflict(hold, reply))
            return reply
        assert isinstance(hold, TaskHold)
        hold.notice = hold.on_interrupted = LossNotice(task, cancels=self._cancels)
        if hold.state is HoldState.LOST:  # before it could be reported
            hold.notice(hold)
        self._begin(hold, held_by(task))
        return None

    async def _release(self, task: AnyTask) -> None:
        hold = self._leave(task, held_by(task))
        if hold.depth:
            await _leave(hold, task)
            return
        error = sys.exc_info()[1]
        ours, loss = await _give_back(hold, succeeded=False)
        if loss is not None and (ours or not _is_cancellation(error)):
            raise loss


async def _leave(hold: Hold, task: AnyTask) -> None:
    """Downgrade what was upgraded for the acquisition that ends, and admit the loop's next task."""
    try:
        await async_acquisition.leave(hold)
    finally:
        end_turn(task, hold)


async def _give_back(hold: Hold, *, succeeded: bool) -> tuple[bool, LockLostError | None]:
    """Release *hold*; return whether only its loss has cancelled the task, and the loss."""
    notice = hold.notice if isinstance(hold, TaskHold) else None
    ours = notice is not None and notice.end()
    lost = not hold.held
    before = await async_acquisition.release(hold, succeeded=succeeded)
    return ours, hold.loss() if lost or before is HoldState.LOST else None


def _is_cancellation(error: BaseException | None) -> bool:
    return isinstance(error, asyncio.CancelledError)


def _this_task() -> AnyTask:
    task = current_task()
    if task is None:
        raise RuntimeError("AsyncLock is owned by an asyncio task, and no task runs here")
    return task


def _patience(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ValueError(
            f"timeout must be a number of seconds, 0 or more, or None, not {timeout!r}"
        )
    return None if math.isinf(timeout) else float(timeout)
