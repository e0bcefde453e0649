"""What a worker has received: facts about a message, and arguments as serializers give them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kombu import serialization
from kombu.message import Message
from kombu.serialization import dumps, loads

from celery_distlock.arguments import SCALARS
from celery_distlock.keys import Receive

from .current import Task
from .lock_header import LockHeader

__all__ = [
    "PLAIN_CONTENT",
    "PROPERTY",
    "Received",
    "Taken",
    "receive_of_call",
    "receive_of_request",
]

PROPERTY = "distlock"  # of a message, in the main process


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


class _Properties(dict[str, Any]):
    """The properties of a message as they came; as an attribute, what its worker knows of it."""

    received: "Received"


class Received(NamedTuple):
    """
    Facts about one message, from its arrival in the worker to the process that runs its task.

    They travel as an attribute of the properties of the task's request, where its body does not see
    them, and come from :class:`~celery_distlock.worker.request.LockedRequest` alone. Of a message's
    properties only what :meth:`note` has put there is read.

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
        headers: The message's headers as they came, but for ours; None: not from a worker.
        header: What ours says.
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
    headers: Mapping[str, Any] | None = None
    header: LockHeader = LockHeader()
    delivery_address: str = ""
    destination: str = ""
    received_at: float | None = None
    events: str = ""

    @classmethod
    def of(cls, request: Any) -> "Received":
        """Return what came with *request*, in the process that runs its task."""
        properties = request.properties
        if isinstance(properties, _Properties):
            return properties.received
        return cls(header=LockHeader.of(request.__dict__))  # Celery's, of a task without a lock

    @classmethod
    def noted_on(cls, message: Message) -> "Received":
        """Read what this process has noted on *message*."""
        noted = message.properties.get(PROPERTY)
        return cls(**noted) if isinstance(noted, _Noted) else cls()

    @staticmethod
    def note(message: Message, **facts: Any) -> None:
        """Note *facts*, some of the attributes, on *message*, beside those noted before."""
        properties: dict[str, Any] = message.properties
        noted = properties.get(PROPERTY)
        if not isinstance(noted, _Noted):
            noted = properties[PROPERTY] = _Noted()
        noted.update(facts)

    def attach_to(self, properties: Mapping[str, Any]) -> dict[str, Any]:
        """Return *properties* for the task's request, with these facts as an attribute."""
        made = _Properties({k: v for k, v in properties.items() if k != PROPERTY})
        made.received = self
        return made


# What decodes to plain values: others may run users' code when a template looks into them.
_PLAIN = {"json": "application/json", "msgpack": "application/x-msgpack"}
PLAIN_CONTENT = frozenset(_PLAIN.values())


def receive_of_call(task: Task, options: Mapping[str, Any] | None = None) -> Receive:
    """
    Return what makes of an argument of a call what the worker receives.

    A call without a message is as one with the task's own serializer. So is, in the end, one whose
    *options* name another serializer, unless that gives plain values.
    """
    own: str = task.serializer
    first = (options or {}).get("serializer") or own
    if first == own or first in _PLAIN:
        return _through(first)
    one, other = _through(first), _through(own)
    return lambda value: other(one(value))


def receive_of_request(task: Task, *, nested: bool = False) -> Receive | None:
    """
    Return the same for what *task* is called with; None: that has been received.

    A *nested* call is one by other code, though *task* has a request with a message.
    """
    if not (nested or task.request.called_directly or task.request.is_eager):
        own: str = task.serializer
        kind = Received.of(task.request).content_type
        if kind in PLAIN_CONTENT or kind == _content_type(own):
            return None
    return receive_of_call(task)


def _content_type(serializer: str) -> str | None:
    names: Mapping[str, str] = serialization.registry.name_to_type  # type: ignore[attr-defined]
    return names.get(serializer)


@functools.cache
def _through(serializer: str) -> Callable[[Any], Any]:
    def receive(value: Any) -> Any:
        if type(value) in SCALARS:
            return value
        try:
            kind, encoding, body = dumps([value], serializer=serializer)
            (received,) = loads(body, kind, encoding, accept=[kind])
        except Exception:  # noqa: BLE001  # Celery says what is wrong with it, or it is not sent
            return value
        return received

    return receive
