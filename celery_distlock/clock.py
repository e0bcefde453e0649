"""
The one clock that measures leases, and the jitter that spreads requests.

Call its functions through the module: :class:`celery_distlock.testing.FakeClock` replaces them.
"""

import functools
import random
import threading
import time
from collections.abc import Callable

from celery_distlock.process.forks import ForkStage, at_fork

_chance = random.Random()  # not the program's, which may have been seeded on purpose


# Returns seconds on a clock that never goes back and that counts suspension. The store's clock runs
# on while a laptop or a virtual machine sleeps, so a lease must be seen to expire during it:
# CLOCK_MONOTONIC stops there, CLOCK_BOOTTIME (Linux) does not. Elsewhere it is the plain monotonic
# clock. Not a Python function, because each step of a lock calls it.
monotonic: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)


# Returns a random number between two others. Not a Python function of ours for the same reason.
jitter: Callable[[float, float], float] = _chance.uniform


def wall() -> float:
    """Return seconds since the epoch, for people to read; no duration is measured with them."""
    return time.time()


def wait(event: threading.Event, timeout: float) -> bool:
    """Wait for *event* for *timeout* seconds at most; return whether it is set."""
    return event.wait(timeout)


at_fork(_chance.seed, ForkStage.IDENTITY)
