"""
The servers that tests run against.

`SERVERS` names them: the embedded Valkey always; what ``DISTLOCK_TEST_REDIS_URL`` points to, if it
is set; a ``redis-server`` of this machine, started by the tests, if there is one.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from collections.abc import Iterator

GIVEN_URL = os.environ.get("DISTLOCK_TEST_REDIS_URL", "")
REDIS_EXECUTABLE = shutil.which("redis-server")

SERVERS = [
    "valkey",
    *(["given"] if GIVEN_URL else []),
    *(["redis"] if REDIS_EXECUTABLE else []),
]


def new_prefix() -> str:
    """A key prefix that no other test has, in this run or any other on the same server."""
    return f"test-{uuid.uuid4().hex[:12]}"


def keys(url: str, prefix: str) -> Iterator[bytes]:
    """The keys in the URL's database that begin with *prefix*."""
    pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + "*"
    with closing(redis.Redis.from_url(url)) as client:
        yield from client.scan_iter(match=pattern, count=1000)


def delete_keys(url: str, prefix: str) -> None:
    found = list(keys(url, prefix))
    if found:
        with closing(redis.Redis.from_url(url)) as client:
            client.delete(*found)


def bring_nearer(url: str, prefix: str, seconds: float) -> None:
    """Let seconds pass for the records on one server."""
    with closing(redis.Redis.from_url(url)) as client:
        for record in keys(url, prefix):
            if record.endswith((b":woken", b":done")):
                for run in client.zrange(record, 0, -1):
                    client.zincrby(record, -1000 * seconds, run)
            elif record.endswith(b":lock"):
                client.pexpire(record, max(1, client.pttl(record) - int(1000 * seconds)))
