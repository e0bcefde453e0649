"""
Locks that are wrong, to see that `make chaos` finds it.

What wakes no waiter, forgets, loses or does not count is found at once; what grants too much, if a
fault comes at the right moment: :mod:`tests.faults.history` goes after those.
"""

from __future__ import annotations

from typing import Any

from celery_distlock.stores.queue_parts import Bearer, SendReply, Sent, Where
from celery_distlock.stores.queue_store import QueueStore
from celery_distlock.stores.redis.delivery import RedisChannels
from celery_distlock.stores.redis.parking import RedisParking
from celery_distlock.stores.redis.sending import RedisCalls
from celery_distlock.stores.redis.store import RedisStore
from celery_distlock.stores.requests import AcquireRequest, ReleaseRequest, SendRequest
from celery_distlock.stores.values import Release, Sending
from tests.faults.history import actor


def wake_no_waiter() -> None:
    """What a release wakes is not sent; nothing sweeps."""
    QueueStore.dispatch = lambda self, wake, **_: Sending.LEFT  # type: ignore[method-assign]
    RedisParking.sweep = lambda self, interval: iter(())  # type: ignore[method-assign]
    RedisChannels.open_channel = lambda self, receive: None  # type: ignore[method-assign]


def forget_the_parked() -> None:
    """A release loses one in thirty of those that it wakes."""
    right = RedisStore.release
    counted = iter(range(10**9))

    def wrong(self: RedisStore, request: ReleaseRequest) -> Release:
        released = right(self, request)
        if next(counted) % 30 == 0:
            for waiter in self.waiters(request.key, limit=1):
                if waiter.run:
                    self.parking.cancel(request.key, waiter.run)
        return released

    RedisStore.release = wrong  # type: ignore[method-assign]


def lose_calls() -> None:
    """One in twenty calls is taken in, and not written down."""
    right = RedisCalls.send
    counted = iter(range(10**9))

    def wrong(self: RedisCalls, request: SendRequest) -> SendReply:
        if next(counted) % 20 == 19:
            return SendReply(Sent.QUEUED)
        return right(self, request)

    RedisCalls.send = wrong  # type: ignore[method-assign]


def serve_by_arrival() -> None:
    """Calls wait without their lane."""
    _send_with(lane=None)


def cap_no_lane() -> None:
    """Calls wait without their lane's cap."""
    _send_with(most=0)


def _send_with(**terms: Any) -> None:
    right = RedisCalls.send

    def wrong(self: RedisCalls, request: SendRequest) -> SendReply:
        return right(self, request._replace(want=request.want._replace(**terms)))

    RedisCalls.send = wrong  # type: ignore[method-assign]


def remember_identities() -> None:
    """An identity that a run has given up is taken for one that still waits."""
    right = RedisCalls.send
    known: dict[tuple[str, str], Bearer] = {}

    def remembering(self: RedisCalls, request: SendRequest) -> SendReply:
        if request.identity:
            known[request.key, request.identity.name] = Bearer(request.run, Where.WAITING)
        return right(self, request)

    RedisCalls.send = remembering  # type: ignore[method-assign]
    RedisCalls.peek = lambda _, *of: known.get(of)  # type: ignore[method-assign]


def count_no_starts() -> None:
    """Rates are not sent to the store."""
    right = RedisStore.acquire

    def wrong(self: RedisStore, request: AcquireRequest) -> Any:
        return right(self, request._replace(want=request.want._replace(rates=())))

    RedisStore.acquire = wrong  # type: ignore[method-assign]


BREAKAGES = {
    **actor.BREAKAGES,
    "wakes no waiter": wake_no_waiter,
    "forgets the parked": forget_the_parked,
    "loses calls": lose_calls,
    "serves by arrival": serve_by_arrival,
    "caps no lane": cap_no_lane,
    "remembers identities": remember_identities,
    "counts no starts": count_no_starts,
}
