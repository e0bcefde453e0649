"""The least that is a lock in Redis: a command to take it, and a script to give it up."""

import time
from uuid import uuid4

import redis

NAME = "bare lock"
TERMS = "SET NX PX of a random token, script that compares and deletes; 30 s, asks every 10 ms"
PAUSE = 0.01  # seconds between attempts
COMPARE_AND_DELETE = """\
if redis.call('GET', KEYS[1]) == ARGV[1] then
    return redis.call('DEL', KEYS[1])
end
return 0
"""


class BareLock:
    def __init__(self, client: redis.Redis, key: str) -> None:
        self._client = client
        self._key = key
        self._token = ""
        self._compare_and_delete = client.register_script(COMPARE_AND_DELETE)

    def acquire(self) -> None:
        self._token = uuid4().hex
        while not self._client.set(self._key, self._token, nx=True, px=30_000):
            time.sleep(PAUSE)

    def release(self) -> None:
        self._compare_and_delete(keys=[self._key], args=[self._token])


def open_lock(url: str, key: str) -> BareLock:
    return BareLock(redis.Redis.from_url(url), f"bare:{key}")
