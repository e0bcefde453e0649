"""
Facts about one message: what its header ``distlock`` says, what its worker has noted on it.

And what its arguments are once a serializer has carried them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kombu import serialization
from kombu.message import Message
from kombu.serialization import dumps, loads

from celery_distlock.arguments import SCALARS
from celery_distlock.keys import Receive
from celery_distlock.stores.identities import ExecutionId, task_id_of

from .current import Task

__all__ = [
    "ADDRESSEE",
    "HEADER",
    "PLAIN_CONTENT",
    "PROPERTY",
    "LockHeader",
    "Received",
    "Taken",
    "addressee_of",
    "execution_id",
    "is_let_in",
    "is_waited_for",
    "receive_of_call",
    "receive_of_request",
    "without_ours",
]

HEADER = "distlock"  # our only header
# An extra field of that header, for one sending: the only queue whose copy of the message counts.
ADDRESSEE = "addressee"


class LockHeader(NamedTuple):
    """
    The history of a message that waited for its lock; sent as the header ``distlock``.

    Attributes:
        woken: It was parked, and its key is reserved for it now.
        run: The execution id under which it was parked.
        parked_at: The slot name of the key at which it was parked.
        names: The slot names of all keys that are reserved for it, if it needs several.
        attempts: Number of times that it was sent again by countdown because its key was taken.
        outages: Number of times that it was sent again since the store last answered.
        requeues: Number of times that it was requeued because the task failed.
        postponed: Number of times that the task postponed itself, or continued at other keys than
            those at which it was parked.
        returned: It held its key before and came back without an end; or its broker reports an
            earlier delivery.
        since: When it first found its key taken, in seconds since the epoch; 0: never.
        sent: It was sent through the store, and has not found its key taken since.
        for_time: It was sent again by countdown, and time alone was in its way then.
        deaths: Number of times that a consumer rejected it to a RabbitMQ dead letter exchange from
            which it came back. RabbitMQ has a header for that, but from version 4.0.1 on it ignores
            the value that a publisher sends: its count restarts when the message is sent again.
    """

    woken: bool = False
    run: str = ""
    parked_at: str = ""
    names: tuple[str, ...] = ()
    attempts: int = 0
    outages: int = 0
    requeues: int = 0
    since: float = 0.0
    sent: bool = False
    postponed: int = 0
    returned: bool = False
    deaths: int = 0
    for_time: bool = False

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> "LockHeader":
        """Read it from a message's headers; the header of another message is ignored."""
        if HEADER not in headers and "x-death" not in headers:  # most messages
            return _NOTHING
        values, deaths = _values_of(headers), _deaths(headers.get("x-death"))
        if values is None:
            return cls(deaths=deaths) if deaths else _NOTHING
        return cls(
            woken=bool(values.get("woken")),
            run=str(values.get("run") or ""),
            parked_at=str(values.get("parked_at") or ""),
            names=_texts(values.get("names")),
            attempts=_whole(values.get("attempts")),
            outages=_whole(values.get("outages")),
            requeues=_whole(values.get("requeues")),
            since=_number(values.get("since")),
            sent=bool(values.get("sent")),
            postponed=_whole(values.get("postponed")),
            returned=bool(values.get("returned")),
            deaths=deaths + _whole(values.get("deaths")),
            for_time=bool(values.get("for_time")),
        )

    def of_next(self, **changes: Any) -> "LockHeader":
        """Return the header for the next execution, which keeps the number of requeues."""
        kept = LockHeader(requeues=self.requeues, postponed=self.postponed, deaths=self.deaths)
        return kept._replace(**changes)

    def parked(self, names: Sequence[str], run: str, **changes: Any) -> "LockHeader":
        """Return the header of the message once it is woken, if parked as *run* at these keys."""
        all_names = tuple(names) if len(names) > 1 else ()
        changes = {"run": run, "parked_at": names[0], "names": all_names, **changes}
        return self._replace(woken=True, for_time=False, **changes)

    @property
    def number(self) -> int:
        """Number of requeues and returns, which is part of its execution's id."""
        return self.requeues + self.postponed + self.deaths

    @property
    def waited_for(self) -> str:
        """What it waited for: ``time``, ``holder``, or ``nothing``, as far as it says."""
        if self.for_time:
            return "time"
        return "holder" if self.since and not self.sent else "nothing"

    @property
    def places(self) -> tuple[str, ...]:
        """The slot names of all keys that may be reserved for it."""
        return self.names or (self.parked_at,)

    def to_header(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header's value, which names its message by these other *headers*."""
        message = {"id": headers.get("id"), "retries": headers.get("retries") or 0}
        return {**self._asdict(), **message}


_NOTHING = LockHeader()


def _values_of(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return the header's fields; None: there is no header, or it is another message's.

    A task may pass all headers of its message on to another call. A header that was written by code
    before 0.1.0 names its message by its run only.
    """
    values = headers.get(HEADER)
    if not isinstance(values, Mapping) or values.get("retries") != (headers.get("retries") or 0):
        return None
    named = str(values.get("id") or ""), task_id_of(str(values.get("run") or ""))
    return values if {*named, ""} <= {str(headers.get("id")), ""} else None


def _deaths(given: Any) -> int:
    """Return how often a message was rejected, by RabbitMQ's entries per queue and reason."""
    known = given if isinstance(given, list) else []
    entries = [each for each in known if isinstance(each, Mapping)]
    return sum(_whole(each.get("count")) for each in entries if each.get("reason") == "rejected")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and abs(value) < 2**53  # not what overflows a float
    return float(value) if known else 0.0


def without_ours(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* without ours."""
    return {name: value for name, value in headers.items() if name != HEADER}


def addressee_of(headers: Mapping[str, Any]) -> str:
    """Return the only queue whose copy of a message counts; empty: each copy counts."""
    values = _values_of(headers)
    # A dead-lettered message has left that queue.
    return "" if values is None or "x-death" in headers else str(values.get(ADDRESSEE) or "")


def execution_id(headers: Mapping[str, Any], lock_header: LockHeader | None = None) -> str:
    """
    Return the execution id of a message with these *headers*.

    Pass *lock_header* if the header ``distlock`` is not among them.
    """
    header = LockHeader.of(headers) if lock_header is None else lock_header
    retries, nesting = headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0
    return str(ExecutionId(headers["id"], retries, header.number, nesting))


def is_waited_for(facts: Mapping[str, Any]) -> bool:
    """Whether a canvas (chain, group, chord, link) depends on the message with these *facts*."""
    return any(map(facts.get, ("chord", "group", "chain", "callbacks", "errbacks")))


def is_let_in(facts: Mapping[str, Any]) -> bool:
    """Whether the message with these *facts* is parked however many wait: also for a retry."""
    return is_waited_for(facts) or bool(facts.get("retries"))


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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it by one function: to look a class up takes longer than all the rest."""
        header, *facts = self.received
        return _properties, (dict(self), None if header is _NOTHING else header, facts)


def _properties(values: dict[str, Any], header: LockHeader | None, facts: list[Any]) -> _Properties:
    made = _Properties(values)
    made.received = Received(header or _NOTHING, *facts)
    return made


class Received(NamedTuple):
    """
    Facts about one message, from its arrival in the worker to the process that runs its task.

    They are passed as an attribute of the properties of the task's request, where its body does not
    see them. Only :class:`~celery_distlock.worker.request.LockedRequest` sets them. In a message's
    properties, only facts that :meth:`note` recorded are read.

    Attributes:
        header: Our header.
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
        delivery_address: The delivery channel of this worker; empty: it has none.
        destination: Where it was sent, by `messages.destination_of`; empty: this worker does not
            consume such a queue any longer.
        received_at: When it arrived, by the local monotonic clock; None: not from a worker.
        events: The name under which the worker sends events; empty while it sends none.
    """

    header: LockHeader = _NOTHING
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
    def noted_on(cls, message: Message, **others: Any) -> "Received":
        """Return the facts that this process recorded on *message*, and *others*."""
        noted = message.properties.get(PROPERTY)
        return cls(**(others | noted)) if isinstance(noted, _Noted) else cls(**others)

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
        made = _Properties(properties)
        made.pop(PROPERTY, None)
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


def receive_of_request(task: Task, request: Any, *, nested: bool = False) -> Receive | None:
    """
    Return the same function for *request* of *task*; None: its arguments have been received.

    A *nested* call is one by other code, though *task* has a request with a message.
    """
    if not (nested or request.called_directly or request.is_eager):
        kind = Received.of(request).content_type
        if kind in PLAIN_CONTENT or kind == _content_type(str(task.serializer)):
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
