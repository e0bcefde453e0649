"""What the tasks of `tests.apps` report to a test, and how it holds them up: lists in Redis."""

from __future__ import annotations

import json
import os
from typing import Any

import redis

from tests.waiting import wait_until


class Clients:
    """
    A client of one Redis for each process.

    The pool of redis-py hangs for ever in a child that was forked while a thread used it.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._by_pid: dict[int, redis.Redis] = {}

    def mine(self) -> redis.Redis:
        try:
            return self._by_pid[os.getpid()]
        except KeyError:
            client = redis.Redis.from_url(self._url, decode_responses=True)
            return self._by_pid.setdefault(os.getpid(), client)


class Journal:
    """Notes by name, in the order in which they were written, by whatever process."""

    def __init__(self, url: str, prefix: str) -> None:
        self._clients = Clients(url)
        self._prefix = f"{prefix}:journal"

    @property
    def _client(self) -> redis.Redis:
        return self._clients.mine()

    @classmethod
    def of_environment(cls) -> Journal:
        return cls(os.environ["DISTLOCK_TEST_BACKEND"], os.environ["DISTLOCK_TEST_PREFIX"])

    def write(self, name: str, note: Any) -> int:
        """Add *note* and return how many there are now."""
        return self._client.rpush(f"{self._prefix}:{name}", json.dumps(note, default=str))

    def read(self, name: str) -> list[Any]:
        return [json.loads(note) for note in self._client.lrange(f"{self._prefix}:{name}", 0, -1)]

    def wait(self, name: str, count: int = 1, timeout: float = 30.0) -> list[Any]:
        """Wait until there are *count* notes, and return all."""
        wait_until(
            lambda: self._client.llen(f"{self._prefix}:{name}") >= count,
            timeout=timeout,
            what=f"{count} notes of {name}",
        )
        return self.read(name)

    def enter(self, name: str) -> int:
        """Count one more task inside; return how many are."""
        return self._client.incr(f"{self._prefix}:inside:{name}")

    def leave(self, name: str) -> None:
        self._client.decr(f"{self._prefix}:inside:{name}")

    def get(self, name: str) -> int:
        return int(self._client.get(f"{self._prefix}:value:{name}") or 0)

    def set(self, name: str, value: int) -> None:
        self._client.set(f"{self._prefix}:value:{name}", value)

    def open(self, gate: str) -> None:
        """Let through what waits at *gate*, now and later."""
        self.set(f"gate:{gate}", 1)

    def pass_gate(self, gate: str) -> None:
        """Wait until *gate* is open."""
        wait_until(lambda: self.get(f"gate:{gate}"), timeout=90.0, what=f"gate {gate}")

    def delete(self, record: str) -> None:
        """Delete a record of the server's, behind its owner's back."""
        assert self._client.delete(record) == 1

    def close(self) -> None:
        self._client.close()
