"""
The one clock that leases are measured with, and the chance that spreads what would collide.

Call its functions by the module: :class:`celery_distlock.testing.FakeClock` puts others in.
"""

import functools
import random
import threading
import time
from collections.abc import Callable

from celery_distlock.process.forks import ForkStage, begin_anew

__all__ = ["jitter", "monotonic", "wait", "wall"]

_chance = random.Random()  # not the program's, which may have been seeded for a purpose


# Returns seconds on a clock that never goes back and that counts suspension. The store's clock runs
# on while a laptop or a virtual machine sleeps, so a lease must be seen to expire over it:
# CLOCK_MONOTONIC stops there, CLOCK_BOOTTIME (Linux) does not. Elsewhere it is the plain monotonic
# clock. Not a Python function, because each step of a lock calls it.
monotonic: Callable[[], float] = (
    functools.partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    if hasattr(time, "CLOCK_BOOTTIME")
    else time.monotonic
)


def wall() -> float:
    """Return seconds since the epoch: for people to read, nothing is measured with them."""
    return time.time()


def wait(event: threading.Event, timeout: float) -> bool:
    """Wait for *event* for *timeout* seconds at most; return whether it has come."""
    return event.wait(timeout)


def jitter(low: float, high: float) -> float:
    """Return a number between *low* and *high*."""
    return _chance.uniform(low, high)


begin_anew(_chance.seed, ForkStage.IDENTITY)
