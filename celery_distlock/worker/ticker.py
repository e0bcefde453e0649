"""
The ticker: admits waiting runs whose key opens through time alone, at that time.

Of the main processes of all workers on one store, one is the ticker. It renews that role every two
seconds; if it stops, another process takes over within four seconds. The ticker sleeps until the
first key is due, or until it is notified of one that is due earlier. It then checks each key that
is due, and dispatches what that admits, as after a release.
"""

import logging
import math
import os
import socket
import threading
import time
import uuid

from celery_distlock.errors import StoreError
from celery_distlock.keys import key_of
from celery_distlock.naming import shown
from celery_distlock.process.dispatcher import UNSENT
from celery_distlock.process.log_lines import log_safely
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.channels import Inbox
from celery_distlock.stores.queue_parts import NO_CLAIM, Claim, Settled
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.values import Sending, WokenTask

__all__ = ["Ticker"]

logger = logging.getLogger(__name__)

VALID_FOR = 3.75  # seconds for which a process remains the ticker without a renewal
RENEWAL = 2.0  # seconds between renewals
LOOK = 1.0  # seconds after which another process checks whether there is a ticker
SHORTEST = 0.01  # seconds: keys that are due within this time are checked together
AFTER_YOU = 4.0  # seconds for which a process that cannot send leaves the role to others


class Ticker:
    """Run a thread that is the ticker of *store*, or checks that another process is."""

    def __init__(self, store: QueueStore) -> None:
        self._store = store
        self._process = f"{os.getpid()}@{socket.gethostname()}:{uuid.uuid4().hex[:8]}"
        self._inbox: Inbox | None = None
        self._stopped = threading.Event()
        self._turn = threading.Lock()  # for requests to the store: none follows the resignation
        self._failing = False
        self._is_led = False  # whether another process was the ticker when this one looked last
        self._thread = DaemonThread("distlock-ticker", self._run)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Step down as ticker and announce it; does not wait for the store."""
        self._stopped.set()
        DaemonThread("distlock-ticker-end", self._resign).start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                pause = self._tick()
                self._failing = False
                self._sleep(pause)
            except Exception as error:  # noqa: BLE001  # it is logged
                # Once per outage as a warning.
                level = logging.DEBUG if self._failing else logging.WARNING
                log_safely(logger, level, "tasks that wait for time to pass start late: %s", error)
                if not isinstance(error, StoreError):
                    log_safely(
                        logger,
                        logging.ERROR,
                        "unexpected error in the ticker; it continues",
                        exc_info=True,
                    )
                self._failing = True
                self._sleep(LOOK)
        if self._inbox is not None:
            self._inbox.close()

    def _sleep(self, pause: float) -> None:
        if self._failing or self._inbox is None or pause < 0:
            self._stopped.wait(abs(pause))
        else:
            self._inbox.wait(max(SHORTEST, pause))

    def _tick(self) -> float:
        """
        Check all keys that are due; return the seconds to sleep.

        A negative result means that another process is the ticker: sleep for its absolute value,
        and ignore notifications until then.
        """
        if self._inbox is None:
            self._inbox = self._store.timetable.ticker_inbox(self._process)
        was_led, self._is_led = self._is_led, False
        if was_led and (left := self._store.timetable.led_for()):
            return self._wait_for_another(left)
        claim = self._claim(NO_CLAIM)
        while claim.leads and claim.names:
            again: dict[str, float | None] = {}
            claimed_at = time.monotonic()
            woken = self._store.parking.wake_due(claim.names, again)
            for became in self._store.dispatch_each(woken, _note_sent, UNSENT):
                if became is Sending.PENDING:  # this process is known to be unable to send it
                    self._resign()
                    return -AFTER_YOU
                if time.monotonic() > claimed_at + UNSENT:
                    break  # by now a sweep, or another ticker, may send the others
            claim = self._claim(Settled(claim.number, again))
        if not claim.leads:
            return self._wait_for_another(claim.pause)
        return min(RENEWAL, claim.pause)

    def _wait_for_another(self, left: float) -> float:
        """Return what `_tick` does while another process is the ticker, for *left* seconds."""
        self._is_led = True
        return -min(LOOK, left + SHORTEST)

    def _claim(self, settled: Settled) -> Claim:
        with self._turn:
            if self._stopped.is_set():
                return Claim(False, math.inf)
            assert self._inbox is not None
            return self._store.timetable.claim_due(self._process, self._inbox, VALID_FOR, settled)

    def _resign(self) -> None:
        try:
            with self._turn:
                if self._inbox is not None:
                    self._store.timetable.claim_due(self._process, self._inbox, 0.0)
        except StoreError as error:
            logger.debug("another ticker takes over in a few seconds: %s", error)


def _note_sent(wake: WokenTask) -> None:
    logger.debug("%r may enter %r now", shown(wake.run), shown(key_of(wake.name)))
