"""Requests and answers that get lost between a store and its servers, in this process."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from redis.exceptions import ConnectionError as RedisConnectionError

from celery_distlock.stores.redis.connections import ConnectionPool

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pytest

    from celery_distlock.stores.redis.connections import Command


class Losses:
    """Loses what a test asks it to lose; everything else goes through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._exchange = ConnectionPool.exchange
        self._mutex = threading.Lock()
        self._matches: Callable[[Command], bool] = lambda _: False
        self._executed = False
        self._left = 0
        self.sent: list[list[Command]] = []
        monkeypatch.setattr(ConnectionPool, "exchange", lambda *request: self._pass_on(*request))  # noqa: PLW0108

    def lose(self, word: str, *, executed: bool, times: int) -> None:
        """
        Lose the next *times* requests of which a command has *word*, or calls that script.

        If *executed* the answer is lost, else the request itself.
        """
        with self._mutex:
            self._matches = lambda call: (
                word in call.head.decode() if call.script is None else call.script.name == word
            )
            self._executed, self._left = executed, times

    @property
    def lost(self) -> bool:
        """Whether all that was to be lost has been."""
        return not self._left

    def _pass_on(self, pool: ConnectionPool, calls: Sequence[Command]) -> list[Any]:
        with self._mutex:
            self.sent.append(list(calls))
            loses = self._left > 0 and any(map(self._matches, calls))
            self._left -= loses
        if not loses:
            return self._exchange(pool, calls)
        if self._executed:
            self._exchange(pool, calls)
        pool.close()
        raise RedisConnectionError("lost on the way")
