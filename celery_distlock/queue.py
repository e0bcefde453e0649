"""The sweeper: finds what a crash left in the queues, and sends it on its way."""

import logging
import threading
from collections.abc import Callable

from . import clock
from .errors import StoreError
from .stores import Store

__all__ = ["Sweeper"]

logger = logging.getLogger(__name__)


class Sweeper:
    """
    A thread that looks through a store's queues every *interval* seconds.

    Any number may run on one store: of all of them, one looks in each interval. *on_swept* is
    called for each task that it finds.
    """

    def __init__(
        self, store: Store, interval: float, *, on_swept: Callable[[], object] = lambda: None
    ) -> None:
        self._store = store
        self._on_swept = on_swept
        self._interval = interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="distlock-sweeper", daemon=True)
        self._failing = False

    def start(self) -> None:
        """Begin to sweep."""
        self._thread.start()

    def stop(self) -> None:
        """End, after the sweep under way at the latest; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval * clock.jitter(0.9, 1.1)):
            try:
                self._sweep()
            except Exception as error:
                # Said once an outage, not every two seconds of it.
                report = logger.debug if self._failing else logger.warning
                report("the queues of %s cannot be swept: %s", self._store.identity, error)
                if not isinstance(error, StoreError):
                    logger.exception("the sweeper stumbled and goes on")
                self._failing = True
            else:
                self._failing = False

    def _sweep(self) -> None:
        for wake in self._store.sweep(self._interval):
            logger.info("swept up a parked task at %s: %s", wake.name, wake.run)
            self._store.dispatch(wake)
            self._on_swept()
