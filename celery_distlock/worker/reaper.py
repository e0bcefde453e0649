"""
Releases the locks of pool processes that died; renews those of processes that are busy.

- The worker's main process checks every 0.2 s whether its children are alive. It does not rely on
  Celery, which can take seconds to notice a death.
- It never takes a key from a process that exists: a process that is stuck, or being terminated,
  holds its key until it is gone. So the lock of such a process is renewed.
- One thread checks and renews, another one releases: a store that does not answer must not delay
  renewals.
"""

import functools
import logging
import queue
import threading
from collections import deque
from typing import Any

from celery import Celery, bootsteps

from celery_distlock import clock, signals
from celery_distlock.engine.acquisition import defaults
from celery_distlock.engine.shared_holds import OrphanedHold, SharedHolds, StalledHolds
from celery_distlock.errors import StoreError
from celery_distlock.naming import holder_name, shown
from celery_distlock.process.background import BackgroundNotifier
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.runtime.app import Runtime
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.values import Ownership

__all__ = ["Reaper", "ReaperStep", "forks"]

logger = logging.getLogger(__name__)

INTERVAL = 0.2  # seconds between checks; a check is one wait() per process, which returns at once
RETRY_AFTER = 0.2  # seconds after a failed release
PATIENCE = 1 / 6  # part of a lease that a renewal waits for an answer

_notifier = BackgroundNotifier("distlock-reaper-signals")


class Reaper:
    """
    Releases and renews locks of pool processes.

    Args:
        shared_holds: The holds of the children, recorded by them in shared memory.
        app: The worker's app.
    """

    def __init__(self, shared_holds: SharedHolds, app: Celery) -> None:
        self._shared_holds = shared_holds
        self._app = app
        self._store = Runtime.of(app).store
        self._found: queue.SimpleQueue[OrphanedHold | None] = queue.SimpleQueue()  # None: the end
        self._stopped = threading.Event()
        self._threads = [
            DaemonThread("distlock-reaper", self._run),
            DaemonThread("distlock-reaper-releases", self._release_found),
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop after a last check."""
        self._stopped.set()
        until = clock.monotonic() + 5.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - clock.monotonic()))

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL):
            self._look()
        self._look()
        self._found.put(None)

    def _look(self) -> None:
        try:
            for orphan in self._shared_holds.reap():
                self._found.put(orphan)
            for stalled in self._shared_holds.stalled():
                self._renew(stalled)
        except Exception:  # noqa: BLE001  # it is logged
            text = "unexpected error while checking pool processes; retrying in %g s"
            log_safely(logger, logging.ERROR, text, INTERVAL, exc_info=True)

    def _renew(self, stalled: StalledHolds) -> None:
        # Skip locks in a task's own store: its address is not known here.
        ours = {i: hold for i, hold in stalled.holds.items() if hold.store == self._store.identity}
        if not ours:
            return
        wanted = [Ownership(hold.key, hold.owner, hold.lease) for hold in ours.values()]
        outcomes = self._store.renew(wanted, min(hold.lease for hold in wanted) * PATIENCE)
        renewed = [
            index for index, (outcome, _) in zip(ours, outcomes, strict=True) if outcome.is_held
        ]
        if renewed:
            self._shared_holds.extend(stalled, renewed, min(asked_at for _, asked_at in outcomes))
            names = ", ".join(repr(shown(ours[index].key)) for index in renewed)
            logger.info(
                "renewed %s for a pool process that does not renew it itself at present", names
            )

    def _release_found(self) -> None:
        left: deque[OrphanedHold] = deque()
        pause = 0.0
        while True:
            try:
                orphan = self._found.get(timeout=pause if left else None)
            except queue.Empty:
                orphan = left.popleft()
            if orphan is None:
                break
            done = self._try_release(orphan)
            pause = 0.0 if done else RETRY_AFTER
            if not done:
                left.append(orphan)
        for orphan in left:
            self._try_release(orphan)

    def _try_release(self, orphan: OrphanedHold) -> bool:
        try:
            return self._release_orphan(orphan)
        except Exception:  # noqa: BLE001  # it is logged
            text = "unexpected error while releasing locks of dead pool processes; retrying in %g s"
            log_safely(logger, logging.ERROR, text, RETRY_AFTER, exc_info=True)
            return False

    def _release_orphan(self, orphan: OrphanedHold) -> bool:
        """Release *orphan*; return false if that must be tried again."""
        if orphan.store != self._store.identity:
            return True  # in the task's own store: its lease expires
        try:
            released = self._store.release(ReleaseRequest(orphan.key, orphan.owner))
        except StoreError:
            return False
        if released.released:
            logger.warning(
                "freed %r, whose holder %s is gone",
                shown(orphan.key),
                holder_name(orphan.owner),
                extra={"lock_key": orphan.key, "lock_holder": orphan.owner},
            )
        self._store.dispatch(released.wake)
        if released.released:
            facts = {"key": orphan.key, "holder": orphan.owner, "reason": "its process is gone"}
            # By another thread: a slow receiver must not delay the release of the next key.
            _notifier.submit(
                functools.partial(signals.send, "lock_freed", self._app, self._store, **facts)
            )
        return True


class ReaperStep(bootsteps.StartStopStep):
    """Releases the keys of a prefork pool's processes as soon as they are gone."""

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._reaper: Reaper | None = None
        # Here, because the pool may start before this step, and its processes inherit the table.
        self._shared_holds = defaults.shared_holds = _make_shared_holds() if forks(parent) else None

    def include_if(self, parent: Any) -> bool:
        """Whether there are pool processes with locked tasks."""
        return self._shared_holds is not None and any(Runtime.of(parent.app).plans.values())

    def include(self, parent: Any) -> bool:
        """Move to the first place of the steps, so as to stop last, after the pool's processes."""
        included: bool = super().include(parent)
        if included:
            parent.steps.insert(0, parent.steps.pop())
        return included

    def start(self, parent: Any) -> None:
        """Start the reaper."""
        assert self._shared_holds is not None
        self._reaper = Reaper(self._shared_holds, parent.app)
        self._reaper.start()

    def stop(self, parent: Any) -> None:
        """Stop the reaper, after a last check."""
        if self._reaper is not None:
            self._reaper.stop()
            self._reaper = None

    terminate = stop


def _make_shared_holds() -> SharedHolds | None:
    try:
        return SharedHolds()
    except OSError as error:
        logger.warning(
            "locks: no room for the shared memory that lists what pool processes hold, so"
            " the key of a process that dies is free only after its lease: %s",
            error,
        )
        return None


def forks(parent: Any) -> bool:
    """Whether the pool of a worker forks processes."""
    pool = parent.pool_cls
    return "prefork" in (pool if isinstance(pool, str) else pool.__module__)
