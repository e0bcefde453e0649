"""Masters that know nothing of one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.topologies.node import Node, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping


class Masters(Topology):
    """*count* servers with *options*, each on its own, as a quorum of locks needs them."""

    def __init__(self, count: int = 5, *, options: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._count = count
        self._options = options

    @property
    def url(self) -> str:
        return f"redlock://{','.join(server.address for server in self.servers)}/0"

    def _start(self) -> None:
        self.servers = [self._started(Node(options=self._options)) for _ in range(self._count)]
