"""Shortens timeouts while a server has not answered for 15 s (a circuit breaker)."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError

from .connections import TIMEOUT

HURRY = 0.5  # seconds for an answer, after a long silence
LONG = 15.0  # seconds: a failover is over by then, and calls must wait for that
REMEMBERED = 30.0  # seconds after which a call waits in full again


class Silence:
    """
    The silence of a server, as far as one process knows.

    A process that makes one call after another, as a beat does, waits in full only once in a while.
    A call that fails in a hurry proves no silence, and an answer ends it.
    """

    def __init__(self) -> None:
        self._since = self._until = -math.inf

    @contextmanager
    def patience(self) -> Iterator[float]:
        """Yield how many seconds to wait for an answer in this block."""
        began = clock.monotonic()
        lasts = began - self._until < REMEMBERED
        hurries = lasts and began - self._since >= LONG
        try:
            yield HURRY if hurries else TIMEOUT
        except StoreUnavailableError:
            now = clock.monotonic()
            # A refusal, even three of them, takes less time than that.
            if not hurries and now - began >= TIMEOUT / 2:
                self._since, self._until = self._since if lasts else began, now
            raise
        self._until = -math.inf
