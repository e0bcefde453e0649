"""What a worker's main process knows of a message, and hands to the process that runs its task."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kombu.message import Message

__all__ = ["HEADER", "Received", "Taken"]

HEADER = "distlock"  # the one header, and the one property, of ours


class Taken(NamedTuple):
    """
    A key that was found taken when the message arrived.

    Attributes:
        key: The key.
        holder: Its owner, or a description of the task that waits for a process before this one.
        run: The holder's execution id; empty for a `Lock`.
        remaining: Seconds left of the holder's lease.
    """

    key: str
    holder: str
    run: str
    remaining: float


class _Noted(dict[str, Any]):
    """Marks what this process has noted on a message; nothing that comes by a wire is one."""


class Received(NamedTuple):
    """
    Facts about one message, from its arrival in the worker to the process that runs its task.

    They travel as a plain dictionary in ``properties["distlock"]``. What a sender puts there is not
    believed: in the main process only what was noted by :meth:`note` counts, and a request's own
    entry is always written by :class:`~celery_distlock.worker.request.LockedRequest`.

    Attributes:
        pushed: It came from the lock store, not from the broker.
        doubtful: The store, or another worker, may have it as well.
        shown: The state ``PARKED`` was stored for its task.
        arrival: When it arrived, in microseconds by the store's clock; 0: that is not known, None:
            nobody has looked yet.
        taken: The key that was taken when it arrived, if its policy is to judge by that.
        returns: Its queue is one that it would be sent to again when it is woken.
        exchange_type: That of the exchange that it was sent to, as far as the main process knows;
            its children do not know what was added to its queues since they were forked.
        copy_of: The queue of this worker's that it came by, if its exchange gives a copy to each.
        content_type: How its body is serialized.
        content_encoding: The body's character set.
        body: The body as it came; None: it is made of the arguments again.
        headers: The names of the message's headers, among all that stands in its task's request;
            None: not from a worker.
        delivery_address: Where this worker takes woken tasks; empty: it takes none.
        destination: Where it was sent, as `messages.destination_of` has it; empty: this worker
            takes no more that is sent there.
        received_at: When it arrived, by the local monotonic clock; None: not from a worker.
        events: The name by which the worker sends events; empty while it sends none.
    """

    pushed: bool = False
    doubtful: bool = False
    shown: bool = False
    arrival: int | None = None
    taken: Taken | None = None
    returns: bool = True
    exchange_type: str = ""
    copy_of: str = ""
    content_type: str | None = None
    content_encoding: str | None = None
    body: Any = None
    headers: tuple[str, ...] | None = None
    delivery_address: str = ""
    destination: str = ""
    received_at: float | None = None
    events: str = ""

    @classmethod
    def of(cls, request: Any) -> "Received":
        """Read what came with *request*, in the process that runs its task."""
        return cls._read((request.properties or {}).get(HEADER))

    @classmethod
    def noted_on(cls, message: Message) -> "Received":
        """Read what this process has noted on *message*."""
        noted = message.properties.get(HEADER)
        return cls._read(noted if isinstance(noted, _Noted) else None)

    @classmethod
    def _read(cls, facts: Any) -> "Received":
        if not isinstance(facts, Mapping):
            return cls()
        received = cls(**{name: facts[name] for name in cls._fields if name in facts})
        return (
            received if received.taken is None else received._replace(taken=Taken(*received.taken))
        )

    @staticmethod
    def note(message: Message, **facts: Any) -> None:
        """Note *facts*, some of the attributes, on *message*, beside those noted before."""
        properties: dict[str, Any] = message.properties
        noted = properties.get(HEADER)
        if not isinstance(noted, _Noted):
            noted = properties[HEADER] = _Noted()
        noted.update(facts)

    def to_properties(self) -> dict[str, Any]:
        """Return what stands in ``properties["distlock"]``."""
        facts = {name: value for name, value in self._asdict().items() if value is not None}
        if self.taken is not None:
            facts["taken"] = tuple(self.taken)
        return facts
