"""
Release, in the background, what may or may not have been acquired.

For a request whose outcome is unknown when its caller has to go on. Each store has its own thread
for as long as there is something to do, so that a store that hangs delays nothing else. This is not
a `Background`: releases are due at times, and the thread ends when it is idle, so that it does not
keep a store that is no longer used.
"""

import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.naming import shown
from celery_distlock.process.forks import ExitStage, ForkStage, PerProcess, at_exit
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores import ReleaseRequest
from celery_distlock.stores.base import Store

logger = logging.getLogger(__name__)

PAUSES = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)  # seconds between attempts
LAST_MOMENT = 1.0  # seconds that the end of the process waits for pending releases
IDLE = 5.0  # seconds that a thread waits for another release before it ends
ANSWERS = 2  # the request itself may still be in a socket when the first release is answered


@dataclass(order=True)
class _PendingRelease:
    due: float
    number: int
    store: Store = field(compare=False)
    request: ReleaseRequest = field(compare=False)
    on_done: Callable[[], None] | None = field(default=None, compare=False)
    attempts: int = field(default=0, compare=False)
    answers: int = field(default=0, compare=False)
    unfinished: bool = field(default=True, compare=False)

    def __post_init__(self) -> None:
        self.made_at = self.due

    def request_by_now(self) -> ReleaseRequest:
        """Return the request; its `keep_for` counts from when the request was made."""
        if self.request.keep_for is None:
            return self.request
        run, seconds = self.request.keep_for
        left = self.made_at + seconds - clock.monotonic()
        return self.request._replace(keep_for=(run, left) if left > 0 else None)


def _attempt(release: _PendingRelease) -> None:
    try:
        released = release.store.release(release.request_by_now())
    except StoreError as error:
        logger.debug("%r is not released yet: %s", shown(release.request.key), error)
    else:
        release.answers += 1
        release.store.dispatch(released.wake)
    release.unfinished = release.answers < ANSWERS and release.attempts < len(PAUSES)
    if release.unfinished:
        release.due = clock.monotonic() + PAUSES[release.attempts]
        release.attempts += 1
    elif release.on_done is not None:
        release.on_done()


def _attempt_safely(release: _PendingRelease) -> None:
    try:
        _attempt(release)
    except Exception:  # noqa: BLE001  # it is logged
        text = "unexpected error while releasing %r; it stays locked until its lease ends"
        log_safely(logger, logging.ERROR, text, shown(release.request.key), exc_info=True)
        release.unfinished = False


class _ReleaseThread:
    """The pending releases of one store, and their thread."""

    def __init__(self, releases: "_PendingReleases", store: Store) -> None:
        self.new: queue.SimpleQueue[_PendingRelease] = queue.SimpleQueue()
        self._releases = releases
        self._store = store  # keeps the store, so that its id is not reused while the thread runs

    def start(self) -> None:
        DaemonThread("distlock-releases", self._run).start()

    def _run(self) -> None:
        waiting: list[_PendingRelease] = []
        while True:
            pause = max(0.0, waiting[0].due - clock.monotonic()) if waiting else IDLE
            try:
                heapq.heappush(waiting, self.new.get(timeout=pause))
                continue
            except queue.Empty:
                if not waiting:
                    if self._releases.end(self._store, self):
                        return
                    continue
                release = heapq.heappop(waiting)
            _attempt_safely(release)
            if release.unfinished:
                heapq.heappush(waiting, release)
            else:
                self._releases.done(release)
            del release  # otherwise its caller's objects would be kept until the next release


class _PendingReleases:
    def __init__(self) -> None:
        self._numbers = itertools.count()
        # Reentrant: a signal handler may give up a key while this is taken.
        self._mutex = threading.RLock()
        self._threads: dict[int, _ReleaseThread] = {}  # by the store's id
        self._unfinished: set[int] = set()

    def add(
        self, store: Store, request: ReleaseRequest, on_done: Callable[[], None] | None = None
    ) -> None:
        number = next(self._numbers)
        made = _PendingRelease(clock.monotonic(), number, store, request, on_done)
        self._unfinished.add(made.number)
        with self._mutex:
            thread = self._threads.get(id(store))
            if thread is None:
                thread = _ReleaseThread(self, store)
                try:
                    thread.start()
                except RuntimeError:  # no thread can be started
                    thread = None
                else:
                    self._threads[id(store)] = thread
            if thread is not None:
                thread.new.put(made)
                return
        made.attempts = len(PAUSES)  # a single attempt; if it fails, the lease ends
        _attempt_safely(made)
        self.done(made)

    def done(self, release: _PendingRelease) -> None:
        self._unfinished.discard(release.number)

    def end(self, store: Store, thread: _ReleaseThread) -> bool:
        """Whether *thread* has nothing left to do, and is forgotten."""
        with self._mutex:
            if not thread.new.empty():
                return False
            if self._threads.get(id(store)) is thread:
                del self._threads[id(store)]
            return True

    def finish(self) -> None:
        """Wait for pending releases, for `LAST_MOMENT` at most."""
        until = clock.monotonic() + LAST_MOMENT
        while self._unfinished and clock.monotonic() < until:
            time.sleep(0.01)


def release_later(
    store: Store, request: ReleaseRequest, on_done: Callable[[], None] | None = None
) -> None:
    """
    Release a key, if the owner has it or gets it later, until the store has answered.

    Its `keep_for` is in seconds from now. *on_done* is called when the store has answered, or when
    there are no attempts left.
    """
    _pending.value.add(store, request, on_done)


def finish() -> None:
    """Wait for pending releases, for a moment."""
    if _pending.is_made:
        _pending.value.finish()


def forget() -> None:
    """Drop pending releases; their leases end instead."""
    _pending.reset()


_pending = PerProcess(_PendingReleases, ForkStage.THREADS)  # the parent's threads release its own
at_exit(finish, ExitStage.RELEASES)
