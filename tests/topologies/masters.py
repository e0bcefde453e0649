"""Masters that know nothing of one another."""

from __future__ import annotations

from tests.topologies.node import Node, Topology


class Masters(Topology):
    """*count* servers, each on its own, as a quorum of locks needs them."""

    def __init__(self, count: int = 5) -> None:
        super().__init__()
        self._count = count

    @property
    def url(self) -> str:
        return f"redlock://{','.join(server.address for server in self.servers)}/0"

    def _start(self) -> None:
        self.servers = [self._started(Node()) for _ in range(self._count)]
