"""The lock of this package, with a capacity."""

import redis

from celery_distlock import Lock
from celery_distlock.keys import slot_name

NAME = "celery-distlock"
TERMS = "lease of 30 s, with watchdog; in the order of arrival"


def open_semaphore(url: str, key: str, units: int) -> Lock:
    return Lock(key, capacity=units, store=url)


def taken(client: redis.Redis, key: str, _units: int) -> int:
    return int(client.hget(f"distlock:{{{slot_name(key)}}}:lock", "used") or 0)
