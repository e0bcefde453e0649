"""The nodes of a cluster: their requests, when they last answered, and their latency."""

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

from redis.exceptions import AskError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.process.threads import DaemonThread
from celery_distlock.stores.urls import host_and_port

from .connections import ANSWERLESS, Command, ConnectionPool, NodeSettings, Server
from .topology import HostPort

logger = logging.getLogger(__name__)

# Seconds after which an answer is doubted: the server may have been suspended in between.
SLOW = 0.02
# Seconds for which a node that did not answer is skipped where others have the same answer.
SILENT = 5.0
USUAL = 8  # the quickest of this number of answers is the estimate of the round trip
USUAL_AT_MOST = 0.25  # seconds
AT_ONCE = 8  # threads that wait for a silent node, with one time limit, without a caller that waits


class ClusterNode(Server):
    """
    One node.

    A master that was suspended answers the requests in its sockets before it learns that another
    has replaced it. So an answer is trusted immediately only if its request cannot have been queued
    there for longer than `SLOW`: the time since it was sent, less the round trip, which is the
    quickest of the last answers. Only trusted answers count for that, and only up to a quarter of a
    second. A master that is slow for long must not become trusted after a suspension of about the
    time that another needs to replace it (at least half a second after it was found missing).

    Attributes:
        silent: Whether the last request has failed; until the next answer.
        answered_at: The local clock at its last answer.
    """

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(*settings)
        self.silent = False
        self.answered_at = -math.inf
        self._failed_at = -math.inf
        self._took: tuple[float, ...] = ()
        self._asked: set[tuple[ConnectionPool, object]] = set()

    @property
    def failed_lately(self) -> bool:
        """Whether to ask other nodes first for what they know as well."""
        return self.silent and clock.monotonic() < self._failed_at + SILENT

    def fall_silent(self) -> None:
        """Note that the node did not answer in time."""
        self._failed_at = clock.monotonic()
        self.silent = True

    def ask(
        self,
        calls: Sequence[Command],
        timeout: float,
        until: float = math.inf,
        confirm: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """
        Send *calls*, but not after *until*, and return their answers.

        If the answers are doubtful, *confirm* is called, which raises unless they can be trusted.

        Raises:
            RedisError: There was no answer, or the connection was refused.
            OSError: As for RedisError.
        """
        pool = self.pool(timeout)
        try:
            pool.connect()
            # Before it is sent: this process may be suspended just after that.
            asked_at = clock.monotonic()
            connection = pool.send(calls, until)
            answers = pool.receive(connection, calls, until)
        except ANSWERLESS:
            self.fall_silent()
            raise
        self.answered_at = clock.monotonic()
        self.silent = False
        took = self.answered_at - asked_at
        if took > SLOW and took > SLOW + min(self._took, default=0.0):
            confirm()
        if took < USUAL_AT_MOST:
            self._took = (*self._took[1 - USUAL :], took)
        return answers

    def ask_in_thread(
        self, timeout: float, work: Callable[[], None], *, sparingly: bool = False
    ) -> None:
        """
        Do *work*, which asks this node, in a new thread.

        Raises:
            RedisTimeoutError: Only with *sparingly*: the node is silent, and enough threads already
                wait for it.
        """
        pool = self.pool(timeout)
        if (
            sparingly
            and self.silent
            and sum(each is pool for each, _ in list(self._asked)) >= AT_ONCE
        ):
            where = host_and_port(self.settings["host"], self.settings["port"])
            raise RedisTimeoutError(f"{where} does not answer, and was asked already")
        mark = pool, object()

        def ask() -> None:
            self._asked.add(mark)
            try:
                work()
            finally:
                self._asked.discard(mark)

        in_new_thread(ask)


class ClusterNodes:
    """
    The nodes in use, by host and port.

    Args:
        settings: Those of each node, except its host and its port.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._nodes: dict[HostPort, ClusterNode] = {}

    def at(self, where: HostPort) -> ClusterNode:
        """Return the node at that host and port."""
        node = self._nodes.get(where)
        if node is None:
            host, port = where
            settings = {**self._settings.settings, "host": host, "port": port}
            made = ClusterNode(NodeSettings(self._settings.connection_class, settings))
            node = self._nodes.setdefault(where, made)
        return node

    def keep_only(self, wanted: Collection[HostPort]) -> None:
        """Forget all other nodes, and close their connections."""
        for where in {*self._nodes}.difference(wanted):
            if (node := self._nodes.pop(where, None)) is not None:
                node.close()

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._nodes.values()):
            node.close()


def named_by(answer: AskError, by: HostPort) -> HostPort:
    """Return the node that *answer* names; without a host, it is the one that has answered."""
    return host_of(answer.host.encode(), by), answer.port


def host_of(given: bytes | None, by: HostPort) -> str:
    """Return the host in an answer of the node *by*, which may leave out its own."""
    return by[0] if given in (None, b"", b"?") else given.decode()


def in_new_thread(work: Callable[[], None]) -> None:
    """Do *work* in a new thread; in this one if the process ends and can start no more."""
    thread = DaemonThread("distlock-cluster", work)
    try:
        thread.start()
    except RuntimeError:
        work()
