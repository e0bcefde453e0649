"""A received message: facts that its worker recorded, and arguments as after serialization."""

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

PROPERTY = "distlock"  # the property of a message that has the facts, in the main process


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
    """Facts that this process recorded on a message; the type proves that no sender wrote them."""


class _Properties(dict[str, Any]):
    """The properties of a message as they came, with the worker's facts as an attribute."""

    received: "Received"


class Received(NamedTuple):
    """
    Facts about one message, from its arrival in the worker to the process that runs its task.

    They are passed as an attribute of the properties of the task's request, where its body does not
    see them. Only :class:`~celery_distlock.worker.request.LockedRequest` sets them. In a message's
    properties, only facts that :meth:`note` recorded are read.

    Attributes:
        pushed: It came from the lock store, not from the broker.
        doubtful: The store, or another worker, may have it as well.
        shown: The state ``PARKED`` was stored for its task.
        arrival: When it arrived, in microseconds by the store's clock; 0: that is not known, None:
            not read yet.
        taken: The key that was taken when it arrived, for policies that decide by that.
        returns: Its queue is one that it can be sent to again when it is woken.
        exchange_type: The type of the exchange that it was sent to, if the main process knows it.
            Its children do not know queues that were added since they were forked.
        copy_of: The queue of this worker by which it came, if its exchange copies it to each queue.
        content_type: How its body is serialized.
        content_encoding: The body's character set.
        body: The body as it came; None: it is serialized again from the arguments.
        headers: The message's headers as they came, without ours; None: not from a worker.
        header: Our header.
        delivery_address: The delivery channel of this worker; empty: it has none.
        destination: Where it was sent, by `messages.destination_of`; empty: this worker does not
            consume such a queue any longer.
        received_at: When it arrived, by the local monotonic clock; None: not from a worker.
        events: The name under which the worker sends events; empty while it sends none.
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
        """Return the facts about the message of *request*, in the process that runs its task."""
        properties = request.properties
        if isinstance(properties, _Properties):
            return properties.received
        return cls(header=LockHeader.of(request.__dict__))  # a request of a task without a lock

    @classmethod
    def noted_on(cls, message: Message) -> "Received":
        """Return the facts that this process recorded on *message*."""
        noted = message.properties.get(PROPERTY)
        return cls(**noted) if isinstance(noted, _Noted) else cls()

    @staticmethod
    def note(message: Message, **facts: Any) -> None:
        """Record *facts*, a part of the attributes, on *message*; earlier ones are kept."""
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


# Serializers that decode to plain values. Objects of others may run users' code when a template
# reads them.
_PLAIN = {"json": "application/json", "msgpack": "application/x-msgpack"}
PLAIN_CONTENT = frozenset(_PLAIN.values())


def receive_of_call(task: Task, options: Mapping[str, Any] | None = None) -> Receive:
    """
    Return the function that converts an argument of a call to what the worker receives.

    A call without a message is treated as if sent with the task's own serializer. So is a call with
    another serializer in *options*, after that one, unless that decodes to plain values.
    """
    own: str = task.serializer
    first = (options or {}).get("serializer") or own
    if first == own or first in _PLAIN:
        return _through(first)
    one, other = _through(first), _through(own)
    return lambda value: other(one(value))


def receive_of_request(task: Task, *, nested: bool = False) -> Receive | None:
    """
    Return the same function for the arguments of *task*; None: they have been received already.

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
        except Exception:  # noqa: BLE001  # Celery reports the error when it sends the call
            return value
        return received

    return receive
