"""
A connection that servers push to: grants to blocked waiters, parked executions to workers.

A push can be lost, so no code may rely on one: a waiter asks on its own from time to time, and a
sweep finds the executions.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MovedError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock

from .cluster_slots import slot_of
from .connections import TIMEOUT, ConnectionFactory, known
from .topology import PushTarget

logger = logging.getLogger(__name__)

IDLE_PING = 5.0  # seconds after which a silent connection is checked with a ping
RESTED = 60.0  # seconds after which a connection without a reader is replaced
PAUSE = (0.2, 1.0)  # seconds between attempts to connect; spread, as all try at once


class PubSubConnection:
    """
    Channels of one server, read over one connection at a time, by one thread at a time.

    Args:
        connect: Makes connections.
        on_message: Called with each message.
        on_confirmed: Called when a channel is confirmed; with True if messages may have been lost
            before.
    """

    def __init__(
        self,
        connect: ConnectionFactory,
        on_message: Callable[[bytes], None],
        on_confirmed: Callable[[bool], None],
    ) -> None:
        self._connect = connect
        self._on_message = on_message
        self._on_confirmed = on_confirmed
        self._connection: Connection | None = None
        self._wanted: dict[str, PushTarget] = {}
        self._confirmed: set[str] = set()
        self._answered_at = self._pinged_at = self._opened_at = 0.0
        self._doubtful = self._gap = False
        # Guards the wanted channels and the commands about them. Reentrant: a signal handler may
        # want a channel while its thread has this.
        self._mutex = threading.RLock()

    def want(self, place: PushTarget) -> None:
        """Begin to listen to the channel of *place*; its messages come once that is confirmed."""
        with self._mutex:
            if place.channel not in self._wanted:
                self._wanted[place.channel] = place
                connection = self._connection
                if connection is not None:
                    self._doubtful = True  # if this fails, redis-py forgets the others' channels
                    connection.send_command(_verb(place), place.channel)
                    self._doubtful = False

    def is_subscribed(self, channel: str) -> bool:
        """Whether the server has confirmed the subscription to *channel*."""
        return channel in self._confirmed

    def listen(self, timeout: float) -> None:
        """
        Take one message, if one comes within *timeout* seconds.

        Raises:
            RedisError: The connection broke or was closed, or cannot be made; the next call makes
                another.
            OSError: As for RedisError.
        """
        connection = self._connection
        if connection is not None and (
            self._doubtful or self._connect.is_stale(connection, self._opened_at)
        ):
            self.close()
            connection = None
        try:
            if connection is None:
                connection = self._open()
            if connection.can_read(min(timeout, IDLE_PING)):
                self._receive(connection)
            else:
                self._ping(connection)
        except BaseException as error:
            was_closed = connection is not None and self._connection is not connection
            # Also after a time limit's exception: half a message may be left in the connection.
            self.close()
            if was_closed and isinstance(error, Exception):  # of any type: the socket is gone
                raise RedisConnectionError("the connection was closed") from error
            raise

    def refresh(self) -> None:
        """Make sure that the connection, which had no reader for a while, is not dead."""
        while self._connection is not None and self._connection.can_read(0):
            self.listen(0)
        if not self.fresh:
            self.close()

    @property
    def fresh(self) -> bool:
        """Whether the server has answered so recently that the connection counts as alive."""
        return clock.monotonic() < self._answered_at + RESTED

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        self._confirmed.clear()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.disconnect()

    def _open(self) -> Connection:
        self._opened_at = clock.monotonic()
        connection = self._connect()
        connection.connect()
        with self._mutex:
            self._doubtful = False
            # First, so that a signal handler that wants a channel sends to it.
            self._connection = connection
            for channel, place in list(self._wanted.items()):
                connection.send_command(_verb(place), channel)
        self._note_life()
        return connection

    def _receive(self, connection: Connection) -> None:
        try:
            message = connection.read_response()
        except ResponseError as error:
            moved = known(error)
            if not isinstance(moved, MovedError):
                raise
            self._lose([c for c in list(self._wanted) if slot_of(c.encode()) == moved.slot_id])
        else:
            self._take(message)

    def _lose(self, channels: Sequence[str]) -> None:
        """Drop *channels*: their slot has moved, and the waiters there look up its new node."""
        for channel in channels:
            self._wanted.pop(channel, None)
            self._confirmed.discard(channel)
        self._on_confirmed(True)

    def _note_life(self) -> None:
        self._answered_at, self._pinged_at = clock.monotonic(), 0.0

    def _ping(self, connection: Connection) -> None:
        now = clock.monotonic()
        if self._pinged_at and now > self._pinged_at + TIMEOUT:
            raise RedisTimeoutError("no answer to a ping")
        if not self._pinged_at and now > self._answered_at + IDLE_PING:
            self._pinged_at = now
            connection.send_command("PING", check_health=False)

    def _take(self, message: Any) -> None:
        self._note_life()
        is_push = isinstance(message, list) and len(message) == 3
        kind, channel, payload = message if is_push else (b"", b"", b"")
        if kind in (b"message", b"smessage"):
            self._on_message(payload)
        elif kind in (b"subscribe", b"ssubscribe"):
            self._confirmed.add(channel.decode())
            self._on_confirmed(self._gap)
            if self._confirmed.issuperset(self._wanted):
                self._gap = True  # from now on, another connection means that some were lost
        elif kind == b"sunsubscribe":
            self._lose([channel.decode()])


def _verb(place: PushTarget) -> str:
    return "SSUBSCRIBE" if place.sharded else "SUBSCRIBE"
