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
    "receive_of_call",
    "receive_of_request",
    "without_ours",
]

HEADER = "distlock"  # the one header of ours
# In the header, too, for one sending only: the queue to whose copy of the message it applies.
ADDRESSEE = "addressee"


class LockHeader(NamedTuple):
    """
    What has happened to a message because of its lock; its header ``distlock``.

    Attributes:
        woken: It was parked, and now it is its turn.
        run: The execution id under which it was parked.
        parked_at: The slot name of the key at which it was parked.
        names: The slot names of all keys that are reserved for it, if it needs several.
        attempts: How often it was sent again by countdown because its key was taken.
        outages: How often it was sent again since the store last answered.
        requeues: How often it was requeued because the task failed.
        postponed: How often the task has postponed itself, or gone on at other keys than those at
            which it was parked.
        returned: It had its key before and came back without an end; or its broker says that it was
            delivered before.
        since: When it first found its key taken, in seconds since the epoch; 0: it has not.
        sent: It has gone through the store as it was sent, and has not found its key taken since.
        deaths: How often a consumer has rejected it to a dead letter exchange of RabbitMQ's, from
            which it came back. The broker says that in a header of its own, which it takes from
            nobody else from version 4.0.1 on: it begins anew when the message is sent again.
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

    @classmethod
    def of(cls, headers: Mapping[str, Any]) -> "LockHeader":
        """Read it from a message's headers; ignore that of another message."""
        if HEADER not in headers and "x-death" not in headers:  # as most messages
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
        )

    def of_next(self, **changes: Any) -> "LockHeader":
        """Return what counts for the next execution, too: how often it was put back."""
        kept = LockHeader(requeues=self.requeues, postponed=self.postponed, deaths=self.deaths)
        return kept._replace(**changes)

    def parked(self, names: Sequence[str], run: str, **changes: Any) -> "LockHeader":
        """Return what the message says when it is woken that is parked as *run* at these keys."""
        all_names = tuple(names) if len(names) > 1 else ()
        changes = {"run": run, "parked_at": names[0], "names": all_names, **changes}
        return self._replace(woken=True, **changes)

    @property
    def number(self) -> int:
        """How often it was put back or has come back; part of its execution's id."""
        return self.requeues + self.postponed + self.deaths

    @property
    def places(self) -> tuple[str, ...]:
        """The slot names of all keys that may be reserved for it."""
        return self.names or (self.parked_at,)

    def to_header(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of the message with these other *headers*, which it names."""
        message = {"id": headers.get("id"), "retries": headers.get("retries") or 0}
        return {**self._asdict(), **message}


_NOTHING = LockHeader()


def _values_of(headers: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """
    Return what the header says; None: there is none, or it is not for this message.

    A task may hand all the headers of its message on to another call. One that was parked by code
    before 0.1.0 names its message by its run alone.
    """
    values = headers.get(HEADER)
    if not isinstance(values, Mapping) or values.get("retries") != (headers.get("retries") or 0):
        return None
    named = str(values.get("id") or ""), task_id_of(str(values.get("run") or ""))
    return values if {*named, ""} <= {str(headers.get("id")), ""} else None


def _deaths(told: Any) -> int:
    """Return how often a message was rejected; RabbitMQ lists each queue and reason."""
    entries = [each for each in told if isinstance(each, Mapping)] if isinstance(told, list) else []
    return sum(_whole(each.get("count")) for each in entries if each.get("reason") == "rejected")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and abs(value) < 2**53  # not what overflows a float
    return float(value) if known else 0.0


def without_ours(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return *headers* as their sender knows them."""
    return {name: value for name, value in headers.items() if name != HEADER}


def addressee_of(headers: Mapping[str, Any]) -> str:
    """Return the queue that a message is for, of all that get a copy of it; empty: for each."""
    values = _values_of(headers)
    # One that is dead has left that queue.
    return "" if values is None or "x-death" in headers else str(values.get(ADDRESSEE) or "")


def execution_id(headers: Mapping[str, Any], lock_header: LockHeader | None = None) -> str:
    """
    Return the id of the execution that a message with these *headers* is for.

    *lock_header*: that of the message, if it is not among them.
    """
    header = LockHeader.of(headers) if lock_header is None else lock_header
    retries, nesting = headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0
    return str(ExecutionId(headers["id"], retries, header.number, nesting))


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
        """Add *facts*, some of the attributes, to those noted on *message*."""
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
