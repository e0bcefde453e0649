"""
The servers that tests run against.

The tests start them: the embedded Valkey, or with ``DISTLOCK_TEST_SERVER``, the path of a server's
binary, that one for every server of every test. What it cannot do is skipped, by its version, and
said: `LACKS`.

What ``DISTLOCK_TEST_REDIS_URL`` points to is one more server for the tests that share one.
"""

from __future__ import annotations

import os
import re
import subprocess
import uuid
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
import redis

if TYPE_CHECKING:
    from collections.abc import Iterator

EXECUTABLE = os.environ.get("DISTLOCK_TEST_SERVER", "")
GIVEN_URL = os.environ.get("DISTLOCK_TEST_REDIS_URL", "")

SERVERS = ["embedded", *(["given"] if GIVEN_URL else [])]


# What some tests need, and the first versions that have it.
NEEDS: dict[str, dict[str, tuple[int, int]]] = {
    "SET with IFEQ": {"Redis": (8, 4), "Valkey": (8, 1)},
    "sharded channels": {"Redis": (7, 0), "Valkey": (7, 2)},
    "CLUSTER MIGRATESLOTS": {"Valkey": (9, 0)},
    "SENTINEL DEBUG": {"Redis": (7, 0), "Valkey": (7, 2)},
    "load that can be slowed down": {"Redis": (7, 0), "Valkey": (7, 2)},
}


def _lacks() -> dict[str, str]:
    if not EXECUTABLE:
        return {}
    command = [EXECUTABLE, "--version"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.match(r"(Redis|Valkey) server v=(\d+)\.(\d+)", shown)
    assert found, f"DISTLOCK_TEST_SERVER is neither a Redis nor a Valkey: {shown!r}"
    kind, version = found[1], (int(found[2]), int(found[3]))
    return {
        what: f"{kind} {version[0]}.{version[1]} has no {what}"
        for what, since in NEEDS.items()
        if version < since.get(kind, (1000, 0))
    }


LACKS = _lacks()  # why a test is skipped, by what it needs


def needs(what: str) -> pytest.MarkDecorator:
    assert what in NEEDS
    return pytest.mark.skipif(what in LACKS, reason=LACKS.get(what, ""))


def skip_without(what: str) -> None:
    """As `needs`, in a fixture."""
    assert what in NEEDS
    if what in LACKS:
        pytest.skip(LACKS[what])


def new_prefix() -> str:
    """A key prefix that no other test has, in this run or any other on the same server."""
    return f"test-{uuid.uuid4().hex[:12]}"


def environment(url: str, prefix: str) -> dict[str, str]:
    """What `tests.apps` read: a server for broker, backend and locks, and their prefix."""
    return {
        "DISTLOCK_TEST_BROKER": url,
        "DISTLOCK_TEST_BACKEND": url,
        "DISTLOCK_TEST_PREFIX": prefix,
    }


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
            if record.endswith((b":woken", b":done", b":due", b":later", b":leaving")):
                for run in client.zrange(record, 0, -1):
                    client.zincrby(record, -1000 * seconds, run)
                _expire_sooner(client, record, seconds)
            elif record.endswith(b":parked"):
                for name in client.zrangebyscore(record, 1, "+inf"):  # 0: no sweep has marked it
                    client.zincrby(record, -1000 * seconds, name)
            elif record.endswith(b":lock"):
                _bring_ends_nearer(client, record, seconds)
                # Last: a field that is set after its end makes another.
                _expire_sooner(client, record, seconds)
            elif record.endswith(b":calls"):
                _bring_identities_nearer(client, record, seconds)
            elif record.endswith(b":tasks"):
                _bring_limits_nearer(client, record, seconds)
            elif record.endswith(b":rate"):
                _bring_starts_nearer(client, record, seconds)


def grant(owner: str | bytes, ends_ms: int = 9_999_999_999_999) -> bytes:
    """Return an exclusive grant of *owner*, as the field ``x`` of a key's record has it."""
    name = owner.encode() if isinstance(owner, str) else owner
    return b"%d 0 -1 h 0 0 %d %b" % (ends_ms, len(name), name)


def owner_of(grant: str) -> str:
    """Return the owner of an exclusive grant, as the field ``x`` of a key's record has it."""
    *_, length, names = grant.split(" ", 7)
    return names[: int(length)]


def _expire_sooner(client: redis.Redis, record: bytes, seconds: float) -> None:
    left = client.pttl(record)
    if left > 0:
        client.pexpire(record, max(0, left - int(1000 * seconds)))


def _bring_ends_nearer(client: redis.Redis, lock: bytes, seconds: float) -> None:
    """Let a rest, and the leases of those that share a key, end sooner."""
    for field, value in client.hgetall(lock).items():
        if field in {b"next", b"rest", b"x"} or field.startswith(b"g:"):
            ends, *others = value.split(b" ", 6)
            sooner = b"%d" % max(0, int(ends) - int(1000 * seconds))
            if others:  # of a grant, when it was granted
                others[4] = b"%d" % max(0, int(others[4]) - int(1e6 * seconds))
            client.hset(lock, field, b" ".join([sooner, *others]))
        elif field.startswith(b"start:"):
            at, terms = value.split(b" ", 1)
            client.hset(lock, field, b"%d %b" % (max(0, int(at) - int(1e6 * seconds)), terms))


def _bring_starts_nearer(client: redis.Redis, rate: bytes, seconds: float) -> None:
    """Let the starts at a key be longer ago."""
    for field, value in client.hgetall(rate).items():
        if field.startswith(b"p:"):
            numbers = [int(number) for number in value.split()]
            times = [0, 1, *range(3, len(numbers), 2)]
            for place in times:
                numbers[place] = max(0, numbers[place] - int(1_000_000 * seconds))
            client.hset(rate, field, b" ".join(b"%d" % number for number in numbers))


def _bring_limits_nearer(client: redis.Redis, tasks: bytes, seconds: float) -> None:
    lines = [line.split(b" ") for line in (client.hget(tasks, "limit") or b"").split(b"\n") if line]
    for words in lines:
        place = 2 if words[0].startswith(b"@") else 1
        if ends := int(words[place]):
            words[place] = b"%d" % max(1, ends - int(1000 * seconds))
    if lines:
        client.hset(tasks, "limit", b"\n".join(map(b" ".join, lines)))


def _bring_identities_nearer(client: redis.Redis, calls: bytes, seconds: float) -> None:
    for identity, value in client.hgetall(calls).items():
        terms, run = value.split(b" ", 1)
        sooner = re.sub(
            rb"\d+", lambda time: b"%d" % max(1, int(time[0]) - int(1000 * seconds)), terms
        )
        client.hset(calls, identity, b" ".join([sooner, run]))
