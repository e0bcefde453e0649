"""The least that is a semaphore with leases in Redis: a set of holders, and a script."""

import time
from uuid import uuid4

import redis

NAME = "set of holders, polled"
TERMS = "script that counts a sorted set, with leases of 30 s; asks every 10 ms"
PAUSE = 0.01  # seconds between attempts
ENTER = """\
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then
    return 0
end
return redis.call('ZADD', KEYS[1], now_ms + 30000, ARGV[1])
"""


class Polling:
    def __init__(self, client: redis.Redis, key: str, units: int) -> None:
        self._client = client
        self._key = key
        self._units = units
        self._holder = ""
        self._enter = client.register_script(ENTER)

    def acquire(self) -> None:
        self._holder = uuid4().hex
        while not self._enter(keys=[self._key], args=[self._holder, self._units]):
            time.sleep(PAUSE)

    def release(self) -> None:
        self._client.zrem(self._key, self._holder)


def open_semaphore(url: str, key: str, units: int) -> Polling:
    return Polling(redis.Redis.from_url(url), _name(key), units)


def taken(client: redis.Redis, key: str, _units: int) -> int:
    return client.zcard(_name(key))


def _name(key: str) -> str:
    return f"polling:{key}"
