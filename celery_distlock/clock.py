"""The one clock that leases are measured with; tests replace it."""

import time

__all__ = ["monotonic"]

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)


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
