"""The current master, by Redis Sentinel."""

import contextlib
import math
import threading
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from celery_distlock import clock
from celery_distlock.errors import StoreUnavailableError
from celery_distlock.stores.findings import Finding, Severity
from celery_distlock.stores.urls import host_and_port

from .cluster_nodes import SLOW
from .connections import (
    ANSWERLESS,
    TIMEOUT,
    Command,
    ConnectionFactory,
    NodeSettings,
    Server,
    command,
)
from .reading import Reading
from .topology import HostPort, PushTarget, Topology

SENTINEL_TIMEOUT = 0.25  # seconds for a sentinel to name the master
FRESH = 1.0  # seconds for which that is trusted
SILENT = 5.0  # seconds for which a sentinel that did not answer is not asked again


class _ToMaster(ConnectionFactory):
    def __init__(self, master: "_Master", timeout: float) -> None:
        super().__init__(master, timeout)
        self._master = master

    def __call__(self) -> Connection:
        host, port = self._master.find()
        return self._master.connection_class(**{**self._settings, "host": host, "port": port})

    def is_stale(self, connection: Any, opened_at: float) -> bool:
        return self._master.known not in (None, (connection.host, connection.port))


class _Master(Server):
    """The server that the sentinels name as master."""

    def __init__(self, sentinels: Sequence[Server], service: str, node: NodeSettings) -> None:
        super().__init__(*node)
        self.known: HostPort | None = None
        self._believed_until = -math.inf
        self._sentinels = sentinels
        self._silent_until: dict[Server, float] = {}
        self._failure: Exception | None = None  # of the last sentinel that named no master
        self._service = service
        self._asking = threading.RLock()  # reentrant: a signal handler may ask while this is taken

    def connect(self, timeout: float) -> ConnectionFactory:
        return _ToMaster(self, timeout)

    def find(self, *, again: bool = False) -> HostPort:
        """
        Return the master; ask for it if the last answer is older than a second, or if *again*.

        While no sentinel answers, the last known master may still serve.
        """
        asked_at = clock.monotonic()
        with self._asking:
            if self.known is not None and self._believed_until > asked_at + (FRESH if again else 0):
                return self.known  # another thread has asked while this one waited, or just before
            found = self._ask_all()
            if self.known is not None and self._believed_until > asked_at + FRESH:
                return self.known  # the answer to a signal handler is newer
            if found is None and self.known is None:
                why = f": {self._failure}" if self._failure else ""
                raise RedisConnectionError(f"no sentinel names a master {self._service!r}{why}")
            # Without an answer, do not ask again for a while: each request would wait for it.
            self._believed_until = clock.monotonic() + (FRESH if found else SILENT)
            before, self.known = self.known, found or self.known
            assert self.known is not None
            if before not in (None, self.known):
                self.close()
            return self.known

    def _ask_all(self) -> HostPort | None:
        """Return the master that most sentinels name; they are asked concurrently."""
        question = [command(b"", "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)]
        named: list[HostPort] = []
        under_way = []
        for sentinel in self._sentinels:
            if clock.monotonic() > self._silent_until.get(sentinel, -math.inf):
                pool = sentinel.pool(SENTINEL_TIMEOUT)
                with self._noting_silence(sentinel):
                    under_way.append((sentinel, pool, pool.send(question)))
        for sentinel, pool, connection in under_way:
            with self._noting_silence(sentinel):
                (answer,) = pool.receive(connection, question)
                if isinstance(answer, list) and answer:
                    with Reading(_where(sentinel), "SENTINEL", answer) as (host, port):
                        named.append((host.decode(), int(port)))
                elif isinstance(answer, ResponseError):
                    self._failure = answer
        return max(named, key=named.count, default=None)

    @contextlib.contextmanager
    def _noting_silence(self, sentinel: Server) -> Iterator[None]:
        try:
            yield
        except (RedisError, OSError, StoreUnavailableError) as error:
            self._failure = error
            self._silent_until[sentinel] = clock.monotonic() + SILENT

    def doubt(self) -> None:
        """Ask before the next request, unless no sentinel has answered just now."""
        if self._believed_until < clock.monotonic() + FRESH:
            self._believed_until = -math.inf


class Sentinels(Topology):
    """
    The server that Redis Sentinel names as master.

    A master that was partitioned, and comes back, accepts requests until it learns that it is a
    replica. So the sentinels are asked again before a request if their last answer is older than a
    second, and after a request that took long. This is not redis-py's client for sentinels, which
    asks them one after another, and is not thread-safe.
    """

    def __init__(
        self, address: str, service: str, sentinels: Sequence[NodeSettings], node: NodeSettings
    ) -> None:
        self.address = address
        self._service = service
        self._sentinels = sentinels
        self._settings = node
        self.after_fork()

    def after_fork(self) -> None:
        self._nodes = [Server(*settings) for settings in self._sentinels]
        self._master = _Master(self._nodes, self._service, self._settings)

    def exchange(self, calls: Sequence[Command], timeout: float) -> list[Any]:
        try:
            master = self._master.find()
            asked_at = clock.monotonic()
            answers = self._master.pool(timeout).exchange(calls)
            if clock.monotonic() > asked_at + SLOW and self._master.find(again=True) != master:
                raise RedisConnectionError(
                    "the answer is from a server that is no longer the master"
                )
        except ANSWERLESS as error:
            answers = [error] * len(calls)
        if any(isinstance(answer, Exception) for answer in answers):
            self._master.doubt()
        return answers

    def place(self, key: bytes, channel: str) -> PushTarget:
        return PushTarget(None, channel)

    def connect(self, node: Hashable) -> ConnectionFactory:
        return self._master.connect(TIMEOUT)

    def check(self) -> list[Finding]:
        return [
            Finding(
                Severity.DOUBT,
                "sentinels",
                f"a sentinel does not answer: {_where(node)}",
                "start it: without a majority of them there is no failover",
            )
            for node in self._nodes
            if not _answers(node)
        ]

    def close(self) -> None:
        self._master.close()
        for node in self._nodes:
            node.close()


def _answers(node: Server) -> bool:
    try:
        return node.pool(SENTINEL_TIMEOUT).exchange([command(b"", "PING")]) == [b"PONG"]
    except (RedisError, OSError):
        return False


def _where(node: Server) -> str:
    return host_and_port(node.settings["host"], node.settings["port"])
