"""One server of a topology, and what all topologies have in common."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import quote

import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from celery_distlock.testing import EmbeddedServer
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import TracebackType

T = TypeVar("T")

_PATIENCE = 5.0  # seconds for one answer


class Node(EmbeddedServer):
    """
    A server that may have a password, and that keeps its configuration as it rewrote it itself.

    So does a sentinel, and a server that a sentinel made a master or a replica.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, str | Sequence[str]] | None = None,
        password: str = "",
        **arguments: Any,
    ) -> None:
        secret = {"requirepass": password, "masterauth": password} if password else {}
        super().__init__(options={**secret, **(options or {})}, **arguments)
        self.password = password

    @property
    def url(self) -> str:
        return f"redis://{userinfo(self.password)}{self.address}/0"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def answers(self) -> bool:
        """Whether it runs and is not paused."""
        return self.running and not self._paused

    def ask(self, *command: str | int) -> Any:
        """What it answers to *command*: texts, numbers and lists, as the server sends them."""
        return self._asked(lambda client: client.execute_command(*command))

    def info(self, section: str) -> dict[str, Any]:
        return self._asked(lambda client: client.info(section))

    def in_sync(self) -> bool:
        """Whether it is a replica, and its master's data are here."""
        return self.info("replication").get("master_link_status") == "up"

    def _asked(self, ask: Callable[[redis.Redis], T]) -> T:
        def once() -> T:
            with self._admin(self.port) as client:
                return ask(client)

        # A server whose role is changed by a sentinel closes its clients' connections. Drivers
        # of old do not try again if that is while they connect.
        retry = Retry(ConstantBackoff(0.05), 5, (redis.ConnectionError,))
        return retry.call_with_retry(once, lambda _: None)

    def _admin(self, port: int) -> redis.Redis:
        return redis.Redis(
            host="127.0.0.1",
            port=port,
            password=self.password or None,
            protocol=2,
            decode_responses=True,
            socket_timeout=_PATIENCE,
            retry=Retry(NoBackoff(), 0),
        )

    def _spawn(self, executable: str | os.PathLike[str], port: int) -> None:
        configuration = self.folder / "server.conf"
        if configuration.exists():
            options: dict[str, list[str]] = {}
            for line in configuration.read_text().splitlines():
                name, _, value = line.strip().partition(" ")
                if name and not name.startswith("#"):
                    options.setdefault(name, []).append(value)
            self._options = options
        super()._spawn(executable, port)

    def _comes_up(self, port: int) -> bool:
        """As `EmbeddedServer` does, with the password."""
        pid = self._process.pid if self._process is not None else 0

        def answer() -> bool:
            with suppress(redis.RedisError), self._admin(port) as client:
                return not self.running or client.info("server")["process_id"] == pid
            return not self.running

        wait_until(answer, what=f"a server on port {port}", poll=0.01)
        return self.running


class Topology:
    """Servers that are started and ended together. A subclass says how, in `_start`."""

    def __init__(self) -> None:
        self.servers: list[Node] = []  # those with data, in the order of their start
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as closing:
            self._closing = closing
            self._start()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    def _start(self) -> None:
        raise NotImplementedError

    def _started(self, node: Node) -> Node:
        self._closing.callback(_end, node)
        node.start()
        return node

    def _at(self, address: str) -> Node:
        """The server with data that subscribed there."""
        return next(server for server in self.servers if server.address == address)


def userinfo(password: str) -> str:
    """What a URL says before the host."""
    return f":{quote(password, safe='')}@" if password else ""


def _end(node: Node) -> None:
    # By force: an orderly end waits for replicas, and nothing is kept anyway.
    node.kill()
    node.close()
