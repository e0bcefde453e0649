"""The tasks of the smoke tests."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import redis
from celery import shared_task

from celery_distlock import LockedTask

LEASE = 3.0  # seconds that a key outlives a worker that was killed, with all of its processes


@shared_task(base=LockedTask, lock_key="{key}", bind=True)
def look(self: Any, key: str) -> tuple[tuple[str, ...], bool]:
    return self.lock.keys, self.lock.held and self.lock.token > 0


@shared_task(base=LockedTask, lock_key="{key}", bind=True)
def count(self: Any, key: str) -> None:
    """Add one, in a way that loses ones where two do so at once."""
    client = self.backend.client
    before = int(client.get(f"count:{key}") or 0)
    time.sleep(0.05)
    client.set(f"count:{key}", before + 1)


@shared_task(base=LockedTask, lock_key="{key}", bind=True, track_started=True)
def hold(self: Any, key: str) -> None:
    _until_let_go(self.backend.client, key)


@shared_task(base=LockedTask, lock_key="{key}", bind=True, track_started=True, lock_lease=LEASE)
def hold_on_a_short_lease(self: Any, key: str) -> None:
    _until_let_go(self.backend.client, key)


def let_go(client: redis.Redis, key: str) -> None:
    """End the tasks that hold *key*."""
    client.set(f"go:{key}", 1)


def _until_let_go(client: redis.Redis, key: str) -> None:
    while True:
        with suppress(redis.RedisError):
            if client.get(f"go:{key}"):
                return
        time.sleep(0.02)
