"""The one clock that leases are measured with, and the chance that spreads what would collide."""

import os
import random
import time

__all__ = ["jitter", "monotonic"]

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)
_chance = random.Random()  # not the program's, which may have been seeded for a purpose


def monotonic() -> float:
    """
    Return seconds on a clock that never goes back and that counts suspension.

    The store's clock runs on while a laptop or a virtual machine sleeps, so a lease must be seen to
    expire over it: CLOCK_MONOTONIC stops there, CLOCK_BOOTTIME (Linux) does not. Elsewhere the
    plain monotonic clock is used.
    """
    if _BOOTTIME is not None:
        return time.clock_gettime(_BOOTTIME)
    return time.monotonic()


def jitter(low: float, high: float) -> float:
    """Return a number between *low* and *high*."""
    return _chance.uniform(low, high)


os.register_at_fork(after_in_child=_chance.seed)
