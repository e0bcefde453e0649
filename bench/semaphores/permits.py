"""
Permits in the way of Redisson's `RPermitExpirableSemaphore`, which is for Java, written again.

A counter of free permits, a sorted set of those that are out, with their ends, and a channel: a
caller that finds none subscribes, and every release is published to all waiters, which all retry.
"""

from uuid import uuid4

import redis

NAME = "counter and channel, as Redisson's"
TERMS = "permits of 30 s by the set of their ends, not renewed; a release wakes all waiters"
PERMIT_MS = 30_000
TAKE = """\
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local ended = redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms)
if redis.call('SETNX', KEYS[1], ARGV[2]) == 0 and ended > 0 then
    redis.call('INCRBY', KEYS[1], ended)
end
if tonumber(redis.call('GET', KEYS[1])) > 0 then
    redis.call('DECR', KEYS[1])
    redis.call('ZADD', KEYS[2], now_ms + ARGV[3], ARGV[1])
    return -1
end
local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
return first[2] - now_ms
"""
GIVE_BACK = """\
if redis.call('ZREM', KEYS[2], ARGV[1]) == 1 then
    redis.call('PUBLISH', KEYS[3], redis.call('INCR', KEYS[1]))
end
"""


class Permits:
    def __init__(self, client: redis.Redis, key: str, units: int) -> None:
        self._names = [_name(key), f"{_name(key)}:ends", f"{_name(key)}:channel"]
        self._units = units
        self._permit = ""
        self._take = client.register_script(TAKE)
        self._give_back = client.register_script(GIVE_BACK)
        self._pubsub = client.pubsub()

    def acquire(self) -> None:
        self._permit = uuid4().hex
        if self._free_after() < 0:
            return
        self._pubsub.subscribe(self._names[2])
        try:
            while (left := self._free_after()) >= 0:
                self._pubsub.get_message(timeout=left)
        finally:
            self._pubsub.unsubscribe(self._names[2])

    def release(self) -> None:
        self._give_back(keys=self._names, args=[self._permit])

    def _free_after(self) -> float:
        """Take a permit; return the seconds until one of the others ends if there is none."""
        args = [self._permit, self._units, PERMIT_MS]
        return self._take(keys=self._names[:2], args=args) / 1000


def open_semaphore(url: str, key: str, units: int) -> Permits:
    return Permits(redis.Redis.from_url(url), key, units)


def taken(client: redis.Redis, key: str, units: int) -> int:
    return units - int(client.get(_name(key)) or units)


def _name(key: str) -> str:
    return f"permits:{{{key}}}"
