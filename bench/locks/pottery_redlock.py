"""Redlock as pottery has it, over one master: what it is compared with has one as well."""

import redis
from pottery import Redlock

NAME = "pottery Redlock"
TERMS = "over one master; released after 30 s, asks every 0 to 200 ms"


def open_lock(url: str, key: str) -> Redlock:
    return Redlock(key=key, masters={redis.Redis.from_url(url)}, auto_release_time=30)
