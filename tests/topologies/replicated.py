"""A master and its replicas, without anything that watches over them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.topologies.node import Node, Topology
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

# A replica is in sync within milliseconds; with the defaults, within one to six seconds: the master
# waits for others that want the same, and the replica looks once a second whether all has come.
REPLICATION = {"repl-diskless-sync-delay": "0", "repl-diskless-load": "swapdb"}
_UNUSED = ("127.0.0.1", 1)  # a port without subscribers


class Replicated(Topology):
    """
    A master and *replicas* in sync with it.

    Servers may be paused, killed and started again by their own methods; `restore` also brings them
    back to where they belong.
    """

    def __init__(
        self, replicas: int = 1, *, password: str = "", options: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._password = password
        self._options = {**REPLICATION, **(options or {})}
        self._master: Node | None = None

    @property
    def url(self) -> str:
        """The present master's."""
        return self.master.url

    @property
    def master(self) -> Node:
        assert self._master is not None
        return self._master

    @property
    def replicas(self) -> list[Node]:
        return [server for server in self.servers if server is not self.master]

    def promote(self, replica: Node) -> None:
        """
        Make *replica* the master; all others that answer follow it, the old master too.

        An old master that is down or paused still takes itself for one when it comes back.
        """
        replica.ask("REPLICAOF", "NO", "ONE")
        self._master = replica
        for server in self.replicas:
            if server.answers:
                self._follow(server)

    def cut(self, replica: Node) -> None:
        """Stop replication to *replica*, which runs on with what it has, until it is restored."""
        replica.ask("REPLICAOF", *_UNUSED)
        wait_until(lambda: not replica.in_sync(), what=f"{replica!r} to lose its master")

    def restore(self, server: Node) -> None:
        """Start or resume *server*, and make it a replica in sync, unless it is the master."""
        server.start()
        server.resume()
        if server is not self.master:
            self._follow(server)

    def _start(self) -> None:
        self._master = self._started(Node(options=self._options, password=self._password))
        options = {**self._options, "replicaof": f"127.0.0.1 {self._master.port}"}
        replicas = [
            self._started(Node(options=options, password=self._password))
            for _ in range(self._replicas)
        ]
        self.servers = [self._master, *replicas]
        for replica in replicas:
            wait_until(replica.in_sync, what=f"{replica!r} to be in sync")

    def _follow(self, server: Node) -> None:
        server.ask("REPLICAOF", "127.0.0.1", self.master.port)
        wait_until(server.in_sync, what=f"{server!r} to be in sync")
