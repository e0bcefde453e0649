"""What the nodes of a queue say."""

import json
import math
from typing import Any, NamedTuple

__all__ = ["Facts", "Record", "facts_of"]


class Facts(NamedTuple):
    """What a node's data say."""

    owner: str = ""
    run: str = ""
    seconds: float = 0.0  # its lease, or how long the key is kept
    token: int = 0  # 0: the transaction that made the node, once it is the first
    capacity: int = 1  # that it was asked for with
    slot: int = -1

    @property
    def alone(self) -> bool:
        return self.capacity == 1

    def data(self) -> bytes:
        told = self._asdict()
        if self.alone:  # as releases write and read it that let nobody in beside another
            del told["capacity"], told["slot"]
        return json.dumps(told).encode()

    @property
    def are_ours(self) -> bool:
        words = isinstance(self.owner, str) and isinstance(self.run, str)
        lasts = isinstance(self.seconds, int | float) and 0 <= self.seconds < math.inf
        numbers = type(self.token) is type(self.capacity) is type(self.slot) is int
        in_range = numbers and 0 <= self.token < 2**63 and self.capacity >= 0 and self.slot >= -1
        return words and lasts and in_range


class Record(NamedTuple):
    """A node as it was read."""

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
        """When it was made, in seconds since the epoch."""
        return float(self.stat.ctime) / 1000

    @property
    def since(self) -> float:
        """When it was granted the key, as far as that is known."""
        return self.came if self.facts.alone else float(self.stat.mtime) / 1000


def facts_of(data: bytes) -> Facts:
    """Return what *data* say; nothing if it was not us who made them."""
    try:
        facts = Facts(**json.loads(data))
    except (TypeError, ValueError, RecursionError):
        return Facts()
    return facts if facts.are_ours else Facts()
