"""python-redis-lock, whose waiters block in BLPOP."""

import redis
import redis_lock

NAME = "python-redis-lock"
TERMS = "expiry of 30 s, not renewed"


def open_lock(url: str, key: str) -> redis_lock.Lock:
    # With redis-py 8's default of 5 seconds a longer BLPOP fails.
    client = redis.Redis.from_url(url, socket_timeout=None)
    return redis_lock.Lock(client, key, expire=30)
