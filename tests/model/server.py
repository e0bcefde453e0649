"""A server in this process that can end a request at any write."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from celery_distlock.stores.memory.commands import COMMANDS
from tests.breaking import WRITES
from tests.rewriting import RewrittenServer

if TYPE_CHECKING:
    from celery_distlock.stores.redis.connections import Command

    from .models import Fault

__all__ = ["BrokenError", "ModelServer"]


class BrokenError(BaseException):
    """A request is not answered."""


class Surroundings(Protocol):
    """What is around a server."""

    now: int

    def heard(self, channel: str, message: bytes) -> bool: ...


class ModelServer(RewrittenServer):
    """
    See the module.

    Attributes:
        fault: What befalls the next requests.
        written: How often each of them has written.
    """

    def __init__(self, world: Surroundings, changes: tuple[tuple[str, str], ...]) -> None:
        super().__init__(*changes)
        self._world = world
        self.begin(None)

    def begin(self, fault: Fault | None) -> None:
        """Count requests from here on."""
        self.fault = fault
        self.written: list[int] = []

    def execute(self, call: Command) -> Any:
        number, fault = len(self.written), self.fault
        self.written.append(0)
        self.keys.now_us = self._world.now
        answer = self._executed(call)
        if fault is not None and fault == (number, 0):
            raise BrokenError
        return answer

    def do(self, name: bytes, *words: bytes) -> Any:
        if name == b"PUBLISH":
            return int(self._world.heard(words[0].decode(), words[1]))
        if name in WRITES:
            if self.fault is not None and self._ends_here():
                raise BrokenError
            self.written[-1] += 1
        return COMMANDS[name].execute(self.keys, *words)

    def _ends_here(self) -> bool:
        request, write = self.fault or (-1, 0)
        return write > 0 and (request, write) == (len(self.written) - 1, self.written[-1])
