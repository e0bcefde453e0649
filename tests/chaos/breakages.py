"""
Locks that are wrong, to see that `make chaos` finds it.

Who wakes nobody, or forgets, is found at once; the other two if a fault comes at the right moment:
:mod:`tests.faults.history` goes after those.
"""

from __future__ import annotations

from celery_distlock.stores.base import Store
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import ReleaseRequest
from celery_distlock.stores.values import Release, Sending
from tests.faults.history import actor


def wake_nobody() -> None:
    """Whom a release wakes is not told; nobody sweeps."""
    Store.dispatch = lambda self, wake, **_: Sending.LEFT  # type: ignore[method-assign]
    RedisStore.sweep = lambda self, interval: iter(())  # type: ignore[method-assign]
    RedisStore.open_channel = lambda self, receive: None  # type: ignore[method-assign]


def forget_the_parked() -> None:
    """A release loses one in thirty of those that it wakes."""
    right = RedisStore.release
    counted = iter(range(10**9))

    def wrong(self: RedisStore, request: ReleaseRequest) -> Release:
        released = right(self, request)
        if next(counted) % 30 == 0:
            for waiter in self.waiters(request.key, limit=1):
                if waiter.run:
                    self.cancel(request.key, waiter.run)
        return released

    RedisStore.release = wrong  # type: ignore[method-assign]


BREAKAGES = {
    **actor.BREAKAGES,
    "wakes nobody": wake_nobody,
    "forgets the parked": forget_the_parked,
}
