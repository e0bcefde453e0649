"""The data of the nodes of a queue."""

import json
import math
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """The contents of a node."""

    owner: str = ""
    run: str = ""
    seconds: float = 0.0  # the lease, or how long the key is reserved
    token: int = 0  # 0: the token is the transaction that made the node, once it is the first
    capacity: int = 1  # as in the request
    slot: int = -1

    @property
    def alone(self) -> bool:
        return self.capacity == 1

    def data(self) -> bytes:
        fields = self._asdict()
        if self.alone:  # the format of releases that have exclusive locks only
            del fields["capacity"], fields["slot"]
        return json.dumps(fields).encode()

    @property
    def are_ours(self) -> bool:
        words = isinstance(self.owner, str) and isinstance(self.run, str)
        lasts = isinstance(self.seconds, int | float) and 0 <= self.seconds < math.inf
        numbers = type(self.token) is type(self.capacity) is type(self.slot) is int
        in_range = numbers and 0 <= self.token < 2**63 and self.capacity >= 0 and self.slot >= -1
        return words and lasts and in_range


class Record(NamedTuple):
    """A node's contents and stat, as they were read."""

    facts: Facts
    stat: Any

    @classmethod
    def read(cls, got: Any) -> "Record":
        return cls(facts_of(got[0]), got[1])

    @property
    def token(self) -> int:
        return self.facts.token or int(self.stat.czxid)

    @property
    def came(self) -> float:
        """When the node was created, in seconds since the epoch."""
        return float(self.stat.ctime) / 1000

    @property
    def since(self) -> float:
        """When the node was granted the key, as far as known."""
        return self.came if self.facts.alone else float(self.stat.mtime) / 1000


def facts_of(data: bytes) -> Facts:
    """Parse *data*; return empty facts if this package did not write them."""
    try:
        facts = Facts(**json.loads(data))
    except (TypeError, ValueError, RecursionError):
        return Facts()
    return facts if facts.are_ours else Facts()
