"""dramatiq's limiter of what runs at once; it does not wait, so a refused caller asks again."""

import time
from contextlib import AbstractContextManager

import redis
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import RedisBackend

NAME = "dramatiq ConcurrentRateLimiter"
TERMS = "one counter for all, changed by WATCH and MULTI, forgotten after 15 min; asks every 10 ms"
PAUSE = 0.01  # seconds between attempts


class Limiter:
    def __init__(self, limiter: ConcurrentRateLimiter) -> None:
        self._limiter = limiter
        self._held: AbstractContextManager[bool]

    def acquire(self) -> None:
        while True:
            attempt = self._limiter.acquire(raise_on_failure=False)
            if attempt.__enter__():
                self._held = attempt
                return
            attempt.__exit__(None, None, None)
            time.sleep(PAUSE)

    def release(self) -> None:
        self._held.__exit__(None, None, None)


def open_semaphore(url: str, key: str, units: int) -> Limiter:
    backend = RedisBackend(client=redis.Redis.from_url(url))
    return Limiter(ConcurrentRateLimiter(backend, _name(key), limit=units))


def taken(client: redis.Redis, key: str, _units: int) -> int:
    return int(client.get(_name(key)) or 0)


def _name(key: str) -> str:
    return f"dramatiq:{key}"
