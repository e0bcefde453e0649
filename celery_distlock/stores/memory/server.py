"""A server in this process, which runs the Redis store's commands and scripts atomically."""

import logging
from functools import lru_cache
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from celery_distlock import clock
from celery_distlock.stores.redis.connections import Command

from .commands import COMMANDS
from .keyspace import Keyspace, RefusedError
from .scripting import interpreter

logger = logging.getLogger(__name__)


class Server:
    """
    A server in this process.

    Its clock is :mod:`celery_distlock.clock`.
    """

    def __init__(self) -> None:
        self.keys = Keyspace()
        milliseconds = round(1000 * (clock.wall() - clock.monotonic()))
        self._epoch_us = 1000 * milliseconds  # whole milliseconds, to which scripts round leases up
        interpreter.value  # noqa: B018  # if Lua is missing, fail now and not at the first request

    def execute(self, call: Command) -> Any:
        """Return the answer to *call*; an error is returned, not raised."""
        mutex = interpreter.value.mutex
        if mutex._is_owned():  # type: ignore[attr-defined]  # threading.Condition uses it, too
            # This is a signal handler in the middle of a script, which must run atomically.
            return ResponseError("BUSY the calling thread is executing a script")
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
            RefusedError: The command is unknown, or the server refuses it.
        """
        command = COMMANDS.get(name)
        if command is None:
            raise RefusedError(f"unknown command '{name.decode(errors='replace')}'")
        if not command.least <= len(words) <= command.most:
            raise RefusedError(f"wrong number of arguments for '{name.decode().lower()}' command")
        return command.execute(self.keys, *words)

    def _deliver(self) -> None:
        """Deliver published messages to listeners, outside of scripts."""
        published = self.keys.published
        while published:
            try:
                listener, message = published.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                listener(message)
            except Exception:
                logger.exception("a listener failed to take a published message")


def _as_of_a_driver(said: str) -> ResponseError:
    """Return the exception that redis-py makes of a server's error."""
    code, _, words = said.partition(" ")
    if code == "OOM":
        return OutOfMemoryError(words)
    return ResponseError(words if code == "ERR" else said)


@lru_cache(maxsize=512)
def _words(head: bytes) -> list[bytes]:
    """Return the words of the packed head of a request."""
    words, at = [], 0
    while at < len(head):
        end = head.index(b"\r\n", at)
        size = int(head[at + 1 : end])
        words.append(head[end + 2 : end + 2 + size])
        at = end + 4 + size
    return words
