"""A server in this process: the commands and scripts of the Redis store, each as a whole."""

import logging
from functools import lru_cache
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from celery_distlock import clock
from celery_distlock.stores.redis.connections import Command

from .commands import COMMANDS
from .keyspace import Keyspace, RefusedError
from .scripting import interpreter

__all__ = ["Server"]

logger = logging.getLogger(__name__)


class Server:
    """
    See the module.

    Its clock is :mod:`celery_distlock.clock`.
    """

    def __init__(self) -> None:
        self.keys = Keyspace()
        milliseconds = round(1000 * (clock.wall() - clock.monotonic()))
        self._epoch_us = 1000 * milliseconds  # whole ones, as scripts round leases up to them
        interpreter.value  # noqa: B018  # it is missed now, and not by the first request

    def execute(self, call: Command) -> Any:
        """Return the answer to *call*; a refusal is an answer."""
        mutex = interpreter.value.mutex
        if mutex._is_owned():  # type: ignore[attr-defined]  # threading.Condition asks so, too
            # A signal's handler in the middle of a script, which must be executed as a whole.
            return ResponseError("BUSY a script is being executed by the thread that asks")
        try:
            with mutex:
                self.keys.turn(self._epoch_us + round(1e6 * clock.monotonic()))
                return self._executed(call)
        except RefusedError as error:
            return _as_of_a_driver(str(error))
        finally:
            self._deliver()

    def _executed(self, call: Command) -> Any:
        name, *head = _words(call.head)
        words = [
            word if type(word) is bytes else str(word).encode("utf-8", "surrogateescape")
            for word in call.arguments
        ]
        if call.script is None:
            return self.do(name, *head, *words)
        _, many, *keys = head
        return interpreter.value.run(call.script, int(many), [*keys, *words], self.do)

    def do(self, name: bytes, *words: bytes) -> Any:
        """
        Execute a command.

        Raises:
            RefusedError: It cannot be.
        """
        command = COMMANDS.get(name)
        if command is None:
            raise RefusedError(f"unknown command '{name.decode(errors='replace')}'")
        if not command.least <= len(words) <= command.most:
            raise RefusedError(f"wrong number of arguments for '{name.decode().lower()}' command")
        return command.execute(self.keys, *words)

    def _deliver(self) -> None:
        """Give listeners what was published, outside of scripts."""
        published = self.keys.published
        while published:
            try:
                listener, message = published.popleft()
            except IndexError:  # another thread has it
                return
            try:
                listener(message)
            except Exception:
                logger.exception("what was published was not taken")


def _as_of_a_driver(said: str) -> ResponseError:
    """Return an error as redis-py makes it of what a server says."""
    code, _, words = said.partition(" ")
    if code == "OOM":
        return OutOfMemoryError(words)
    return ResponseError(words if code == "ERR" else said)


@lru_cache(maxsize=512)
def _words(head: bytes) -> list[bytes]:
    """Return the words of a request's packed beginning."""
    words, at = [], 0
    while at < len(head):
        end = head.index(b"\r\n", at)
        size = int(head[at + 1 : end])
        words.append(head[end + 2 : end + 2 + size])
        at = end + 4 + size
    return words
