"""How long a call waits for a server that has not answered the calls before it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError

from .connections import TIMEOUT

__all__ = ["Silence"]

HURRY = 0.5  # seconds for an answer, in a long silence
LONG = 15.0  # seconds: a failover is over by then, and calls are to wait for that
REMEMBERED = 30.0  # seconds after which a call waits in full again


class Silence:
    """
    That of a server, as far as one process knows.

    Who makes one call after the other, as a beat does, waits in full but once in a while. What
    fails in a hurry proves no silence, and an answer ends it.
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
            # What is refused, be it three times, takes less than that.
            if not hurries and now - began >= TIMEOUT / 2:
                self._since, self._until = self._since if lasts else began, now
            raise
        self._until = -math.inf
