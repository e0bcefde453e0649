"""Where a Redis store's records are: on one server, on the current master, on a cluster."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from celery_distlock.stores.findings import Finding

if TYPE_CHECKING:
    from .connections import Command, ConnectionFactory

HostPort: TypeAlias = tuple[str, int]


class PushTarget(NamedTuple):
    """Where pushes about a key are sent: a server, and the channel to use there."""

    node: Hashable
    channel: str

    @property
    def sharded(self) -> bool:
        """Whether it is a channel of one slot. The scripts also recognise it by the brace."""
        return "{" in self.channel


class Topology(ABC):
    """
    One or more servers that are one place for locks.

    Attributes:
        address: For people, without passwords; equal for equal places.
        in_order: Whether calls that are sent together are executed in their order.
    """

    address: str
    in_order = True

    def requests(self, before: "Sequence[Command]", call: "Command") -> "list[list[Command]]":
        """Return the requests, one after another, by which *call* is executed after *before*."""
        return [list(before), [call]] if before and not self.in_order else [[*before, call]]

    @abstractmethod
    def exchange(self, calls: "Sequence[Command]", timeout: float) -> list[Any]:
        """
        Send *calls* and return their answers.

        A refusal is an answer, and so is one of `ANSWERLESS` where there was none.

        Raises:
            RedisError: A connection was refused.
        """

    @abstractmethod
    def place(self, key: bytes, channel: str) -> PushTarget:
        """Return where pushes about *key* go, for a subscriber to *channel*."""

    @abstractmethod
    def connect(self, node: Hashable) -> "ConnectionFactory":
        """Return a factory of connections to the server of a :class:`PushTarget`."""

    def nodes(self) -> Sequence[Hashable]:
        """Return the servers that have keys, as a :class:`PushTarget` names them."""
        return (None,)

    def replicas(self) -> Sequence[Hashable]:
        """Return the servers that may replace one of them, where these are known."""
        return ()

    def has(self, node: Hashable) -> bool:
        """Return whether *node*, as in a :class:`PushTarget`, is one of them, as far as known."""
        return True

    def share(self, keys: Sequence[bytes]) -> bool:
        """Return whether one script may use all of *keys*."""
        return True

    def check(self) -> list[Finding]:
        """Return findings about the way the servers work together."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    @abstractmethod
    def after_fork(self) -> None:
        """Drop the parent's connections after a fork, without sending anything over them."""
