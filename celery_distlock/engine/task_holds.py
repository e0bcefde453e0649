"""What an asyncio task holds, and how the task is notified of its loss."""

import asyncio
import logging
import threading
from typing import Any
from weakref import ref

from celery_distlock.key import Key
from celery_distlock.naming import shown
from celery_distlock.process.notifications import log
from celery_distlock.stores.base import Store

from .hold import Hold, Terms

logger = logging.getLogger(__name__)


class TaskHold(Hold):
    """
    A key that an asyncio task asks for or holds.

    It is renewed for as long as the task may go on: not after the task has ended without a release,
    nor after its loop was closed.
    """

    __slots__ = ("_loop", "_task", "notice")

    def __init__(
        self, task: "asyncio.Task[Any]", store: Store, key: str | Key, terms: Terms, **more: Any
    ) -> None:
        super().__init__(store, key, terms, label=task.get_name(), **more)
        self._loop = task.get_loop()
        self._task = ref(task)  # weak: what a task holds must not keep the task
        self.notice: LossNotice | None = None

    @property
    def is_orphaned(self) -> bool:
        task = self._task()
        return task is None or task.done() or self._loop.is_closed()


class LossNotice:
    """
    Notifies a task that its lock is lost, once, until :meth:`end`.

    Args:
        task: The one that holds the lock.
        cancels: Cancel the task; otherwise the loss is only logged.
    """

    def __init__(self, task: "asyncio.Task[Any]", *, cancels: bool) -> None:
        self._task = ref(task)
        self._loop = task.get_loop()
        self._cancels = cancels
        self._before = task.cancelling()
        self._listens = True
        self._cancelled = False
        self._once = threading.Lock()  # taken by the call that notifies

    def __call__(self, hold: Hold) -> None:
        """
        Notify the task, from any thread.

        Both the finder of the loss and the code that begins to listen may call this: receivers of
        signals run between the loss and its notice.
        """
        if not self._once.acquire(blocking=False):
            return
        if self._cancels:
            try:
                self._loop.call_soon_threadsafe(self._cancel, hold.key)
            except RuntimeError:
                logger.debug("%r was lost in a loop that is closed", shown(hold.key))
        log(logger, logging.WARNING, "%s", hold.loss())

    def _cancel(self, key: str) -> None:
        task = self._task()
        if self._listens and task is not None and not task.done():
            self._cancelled = True
            task.cancel(f"lock {shown(key)!r} was lost")

    def end(self) -> bool:
        """
        Stop notifying; called in the task.

        Returns:
            Whether the task was cancelled for the loss and by no other caller: then the
            cancellation is undone, as by :func:`asyncio.timeout`, and an error must report the
            loss.
        """
        self._listens = False
        task = self._task()
        return self._cancelled and task is not None and task.uncancel() <= self._before
