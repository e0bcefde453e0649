"""The nodes of a cluster: what each was asked, when it was heard from, how long it takes."""

import logging
import math
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from redis.exceptions import AskError
from redis.exceptions import TimeoutError as RedisTimeoutError

from celery_distlock import clock
from celery_distlock.stores.urls import host_and_port

from .connections import ANSWERLESS, Command, ConnectionPool, NodeSettings, Server
from .topology import HostPort

__all__ = ["SLOW", "ClusterNode", "ClusterNodes", "beside", "host_of", "named_by"]

logger = logging.getLogger(__name__)

SLOW = 0.02  # seconds after which an answer is doubted: its server may have stood still meanwhile
SILENT = 5.0  # seconds for which one that did not answer is not asked what others know, too
USUAL = 8  # of so many answers the quickest says how long the way there and back takes
USUAL_AT_MOST = 0.25  # seconds
AT_ONCE = 8  # threads that wait for a silent node, with one time limit, when nobody waits for them


class ClusterNode(Server):
    """
    One node.

    A master that stood still answers what lies in its sockets before it hears that another has
    taken its place. So an answer is believed at once only if its request cannot have lain there for
    longer than `SLOW`: that is the time since it was sent, less what the way there and back takes,
    which the quickest of the last answers tells. Only answers that were believed tell it, and up to
    a quarter of a second only: a master that is slow for long must not come to be believed after
    having stood still for about as long as another needs to take its place (half a second at least
    after it was found missing).

    Attributes:
        silent: Whether the last request has failed; until it is heard from again.
        heard_at: The local clock when it was heard from.
    """

    def __init__(self, settings: NodeSettings) -> None:
        super().__init__(*settings)
        self.silent = False
        self.heard_at = -math.inf
        self._failed_at = -math.inf
        self._took: tuple[float, ...] = ()
        self._asked: set[tuple[ConnectionPool, object]] = set()

    @property
    def failed_lately(self) -> bool:
        """Whether others should be asked what they know as well as it."""
        return self.silent and clock.monotonic() < self._failed_at + SILENT

    def fall_silent(self) -> None:
        """Note that it did not answer in time."""
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

        If they are doubtful, *confirm* is called, which raises unless they are to be believed.

        Raises:
            RedisError: There was no answer, or the connection was refused.
            OSError: Likewise.
        """
        pool = self.pool(timeout)
        try:
            pool.connect()
            asked_at = clock.monotonic()  # before it is sent: we may stand still just after that
            connection = pool.send(calls, until)
            answers = pool.receive(connection, calls, until)
        except ANSWERLESS:
            self.fall_silent()
            raise
        self.heard_at = clock.monotonic()
        self.silent = False
        took = self.heard_at - asked_at
        if took > SLOW and took > SLOW + min(self._took, default=0.0):
            confirm()
        if took < USUAL_AT_MOST:
            self._took = (*self._took[1 - USUAL :], took)
        return answers

    def ask_beside(
        self, timeout: float, work: Callable[[], None], *, sparingly: bool = False
    ) -> None:
        """
        Do *work*, which asks this node, in a thread of its own.

        Raises:
            RedisTimeoutError: The node is silent, it is to be asked *sparingly* then, and enough
                threads wait for it already.
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

        beside(ask)


class ClusterNodes:
    """
    Those that are used, by where they are.

    Args:
        settings: Of each, but for its host and its port.
    """

    def __init__(self, settings: NodeSettings) -> None:
        self._settings = settings
        self._nodes: dict[HostPort, ClusterNode] = {}

    def at(self, where: HostPort) -> ClusterNode:
        """Return the one that is there."""
        node = self._nodes.get(where)
        if node is None:
            host, port = where
            settings = {**self._settings.settings, "host": host, "port": port}
            made = ClusterNode(NodeSettings(self._settings.connection_class, settings))
            node = self._nodes.setdefault(where, made)
        return node

    def keep_only(self, wanted: Collection[HostPort]) -> None:
        """Forget all others, and give their connections back."""
        for where in {*self._nodes}.difference(wanted):
            if (node := self._nodes.pop(where, None)) is not None:
                node.close()

    def close(self) -> None:
        """Give all connections back."""
        for node in list(self._nodes.values()):
            node.close()


def named_by(answer: AskError, by: HostPort) -> HostPort:
    """Return the node that *answer* names; without a host, it is the one that has answered."""
    return host_of(answer.host.encode(), by), answer.port


def host_of(given: bytes | None, by: HostPort) -> str:
    """Return a host that the node *by* names; it may leave out its own."""
    return by[0] if given in (None, b"", b"?") else given.decode()


def beside(work: Callable[[], None]) -> None:
    """Do *work* in a thread of its own; in this one if the process ends and can have no more."""
    thread = threading.Thread(target=work, name="distlock-cluster", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        work()
