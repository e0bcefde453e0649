"""The sweeper: finds what a crash left in the queues, and dispatches it."""

import logging
import threading
from collections.abc import Callable

from celery_distlock import clock
from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import UNSENT
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores import QueueStore
from celery_distlock.stores.values import Sending, WokenTask

logger = logging.getLogger(__name__)

# Intervals; without it, the process of the last sweep would nearly always do the next.
AFTER_YOU = 1.5


class Sweeper:
    """
    A thread that looks through a store's queues every *interval* seconds.

    Any number may run on one store: only one of them sweeps in each interval. *on_swept* is called
    for each task that it finds and sends. When the broker hangs, it ends its turn.
    """

    def __init__(
        self, store: QueueStore, interval: float, *, on_swept: Callable[[], object] = lambda: None
    ) -> None:
        self._store = store
        self._on_swept = on_swept
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = DaemonThread("distlock-sweeper", self._run)
        self._failing_since = 0.0  # by the local clock; 0: it is not failing

    def start(self, *, unreachable: bool = False) -> None:
        """Begin to sweep; *unreachable*: the store does not answer at present."""
        self._failing_since = clock.monotonic() if unreachable else 0.0
        self._thread.start()

    def stop(self) -> None:
        """End, after the current sweep at the latest; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        patience = 1.0
        while not self._stopped.wait(self._interval * patience * clock.jitter(0.9, 1.1)):
            patience = 1.0
            try:
                if self._sweep():
                    patience = AFTER_YOU
            except Exception as error:  # noqa: BLE001  # it is logged
                self._note_failure(error)
            else:
                self._note_success()

    def _note_failure(self, error: Exception) -> None:
        # At WARNING once per outage, not every two seconds of it.
        level = logging.DEBUG if self._failing_since else logging.WARNING
        text = "the queues in the lock store %s cannot be swept: %s"
        log_safely(logger, level, text, self._store.address, error)
        if not isinstance(error, StoreError):
            text = "unexpected error in a sweep; the next one runs as planned"
            log_safely(logger, logging.ERROR, text, exc_info=True)
        self._failing_since = self._failing_since or clock.monotonic()

    def _note_success(self) -> None:
        if self._failing_since:
            seconds = clock.monotonic() - self._failing_since
            text = "the lock store %s is back after %.0f s; its queues are swept again"
            log_safely(logger, logging.WARNING, text, self._store.address, seconds)
        self._failing_since = 0.0

    def _sweep(self) -> bool:
        """Return whether it found something that this process could not send."""
        left = False
        found = self._store.parking.sweep(self._interval)
        for became in self._store.dispatch_each(found, self._note_swept, UNSENT):
            if became is Sending.PENDING:
                return True  # the broker hangs, at least for this process: leave the rest to others
            left |= became is Sending.LEFT
        return left

    def _note_swept(self, wake: WokenTask) -> None:
        name, run = shown(key_of(wake.name)), shown(wake.run)
        logger.info("swept up a parked task at %r: %r", name, run)
        self._on_swept()
