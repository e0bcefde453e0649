"""The lock that comes with redis-py."""

import redis
from redis.lock import Lock

NAME = "redis-py Lock"
TERMS = "timeout of 30 s; asks every 100 ms"


def open_lock(url: str, key: str) -> Lock:
    return redis.Redis.from_url(url).lock(f"redis-py:{key}", timeout=30)
