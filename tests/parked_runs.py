"""The records of parked runs on one server, as `runs.lua` has them: read and write them by hand."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import redis


def park(client: redis.Redis, prefix: str, key: str, run: str, envelope: bytes) -> None:
    """Leave *envelope* in the queue of *key*, as *run*."""
    stem, arrival = f"{prefix}:{{{key}}}:", int(1e6 * time.time())
    client.zadd(f"{stem}queue", {f"p:{run}": arrival})
    client.hset(f"{stem}tasks", f"e:{run}", envelope)
    write(client, f"{stem}tasks", run, {"s": "waiting", "p": str(arrival)})
    client.zadd(f"{prefix}:parked", {key: 0})


def records(client: redis.Redis, tasks: str) -> dict[str, dict[str, Any]]:
    """Return what the record named *tasks* says of its runs, by their names."""
    return {run: json.loads(text) for run, text in _fields(client, tasks, b"r:").items()}


def envelopes(client: redis.Redis, tasks: str) -> dict[str, bytes]:
    """Return what is parked in the record named *tasks*, by its runs."""
    return _fields(client, tasks, b"e:")


def _fields(client: redis.Redis, tasks: str, kind: bytes) -> dict[str, bytes]:
    found = client.hgetall(tasks).items()
    return {name[2:].decode(): value for name, value in found if name[:2] == kind}


def write(client: redis.Redis, tasks: str, run: str, record: dict[str, Any]) -> None:
    """Write what the record named *tasks* says of *run*."""
    client.hset(tasks, f"r:{run}", json.dumps(record))
