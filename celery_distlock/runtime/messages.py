"""
A task's message as it was received, and back: what is parked is this, and what is sent again.

Celery's own ways of sending a task again (``retry``, ``signature_from_request``) change it: they
count a retry, drop the compression, and lose routing. This keeps everything but the delivery tag.
"""

import base64
import dataclasses
import datetime
import functools
import inspect
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from amqp.exceptions import ChannelError, MessageNacked
from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu import Producer
from kombu.compression import get_encoder
from kombu.entity import maybe_delivery_mode
from kombu.exceptions import OperationalError
from kombu.message import Message
from kombu.serialization import dumps as serialize
from kombu.serialization import loads as deserialize
from kombu.serialization import prepare_accept_content, registry  # type: ignore[attr-defined]
from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from celery_distlock.process import forks
from celery_distlock.stores.identities import ExecutionId

from .received import HEADER, Received

__all__ = [
    "Content",
    "LockHeader",
    "MalformedError",
    "accepted_content",
    "arguments_that_came",
    "broker_errors",
    "broker_reason",
    "execution_id",
    "header_names",
    "is_refusal",
    "places_of",
    "publish",
    "seal",
    "seal_call",
    "seal_message",
    "seconds_until",
    "to_message",
    "when",
    "with_eta",
]

# A property of such a name would say how it is sent.
_OPTIONS = frozenset(inspect.signature(Producer.publish).parameters)
_TEXTS = ("correlation_id", "reply_to", "message_id", "type", "user_id", "app_id", "cluster_id")

# What celery.worker.request and celery.app.trace put beside the headers in a task's request.
_NOT_HEADERS = frozenset(
    [
        "args",
        "kwargs",
        "callbacks",
        "errbacks",
        "chain",
        "chord",
        "properties",
        "reply_to",
        "correlation_id",
        "hostname",
        "delivery_info",
        "is_eager",
        "called_directly",
        "headers",
        "time_limit",
        "soft_time_limit",
    ]
)
_NOT_PROPERTIES = frozenset(
    {
        *("delivery_info", "delivery_tag", "body_encoding", HEADER),
        *("content_type", "content_encoding", "application_headers"),  # AMQP has them among these
        # What SQS was told of one sending: it takes no second message of such an id in five
        # minutes, without a word, and would delay again what has come.
        *("MessageDeduplicationId", "DelaySeconds", "delay_seconds"),
    }
)


class MalformedError(ValueError):
    """An envelope cannot be sent: it is spoilt."""


@dataclass(frozen=True, slots=True)
class LockHeader:
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
        postponed: How often the task has postponed itself.
        returned: It had its key before and came back without an end; or its broker says that it was
            delivered before.
        since: When it first found its key taken, in seconds since the epoch; 0: it has not.
        sent: It has gone through the store as it was sent, and has not found its key taken since.
        deaths: How often a consumer has rejected it to a dead letter exchange of RabbitMQ's, from
            which it came back; the broker says that, in a header of its own.
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
        """
        Read it from a message's headers, or a request's facts.

        ``self.retry()`` copies the header into the message of the next attempt. There only the
        numbers of requeues and postponements count; the rest was about the attempt before.
        """
        values, deaths = headers.get(HEADER), _deaths(headers.get("x-death"))
        if not isinstance(values, Mapping):
            return cls(deaths=deaths) if deaths else _NOTHING
        requeues, postponed = _whole(values.get("requeues")), _whole(values.get("postponed"))
        if values.get("retries") != (headers.get("retries") or 0):
            return cls(requeues=requeues, postponed=postponed, deaths=deaths)
        return cls(
            woken=bool(values.get("woken")),
            run=str(values.get("run") or ""),
            parked_at=str(values.get("parked_at") or ""),
            names=_texts(values.get("names")),
            attempts=_whole(values.get("attempts")),
            outages=_whole(values.get("outages")),
            requeues=requeues,
            since=_number(values.get("since")),
            sent=bool(values.get("sent")),
            postponed=postponed,
            returned=bool(values.get("returned")),
            deaths=deaths,
        )

    @property
    def number(self) -> int:
        """How often it was put back, or has come back, as its execution's id tells."""
        return self.requeues + self.postponed + self.deaths

    @property
    def places(self) -> tuple[str, ...]:
        """The slot names of all keys that may be reserved for it."""
        return self.names or (self.parked_at,)

    def to_header(self, retries: int) -> dict[str, Any]:
        """Return the header of a message that has been retried that often."""
        return {**{name: getattr(self, name) for name in _FACTS}, "retries": retries}


_NOTHING = LockHeader()
_FACTS = tuple(field.name for field in dataclasses.fields(LockHeader) if field.name != "deaths")


def _deaths(told: Any) -> int:
    """Return how often a message was rejected, as RabbitMQ tells of each queue and reason."""
    entries = [each for each in told if isinstance(each, Mapping)] if isinstance(told, list) else []
    return sum(_whole(each.get("count")) for each in entries if each.get("reason") == "rejected")


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else ()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _number(value: Any) -> float:
    known = isinstance(value, int | float) and abs(value) < 2**53  # not what overflows a float
    return float(value) if known else 0.0


def seal(request: Any, lock_header: LockHeader) -> bytes:
    """
    Return the message that *request* came with, and *lock_header* in its header.

    Its content type, its body, and which of the request's facts are headers come from the worker's
    main process, see :mod:`celery_distlock.worker.request`.
    """
    properties = dict(request.properties or {})
    received = Received.of(request)
    content_type = received.content_type or "application/json"
    encoding = received.content_encoding or "utf-8"
    body = received.body
    if body is None:
        embedded = {
            name: getattr(request, name) for name in ("callbacks", "errbacks", "chain", "chord")
        }
        payload = (request.args, request.kwargs, embedded)
        _, _, body = serialize(payload, serializer=registry.type_to_name[content_type])
    headers = _headers_of(request, received)
    rest = properties, (content_type, encoding, body), request.delivery_info or {}, lock_header
    try:
        return _sealed(headers, *rest)
    except (TypeError, ValueError):  # users' code has put something else into the request
        headers = {name: value for name, value in headers.items() if _can_be_sent(value)}
        return _sealed(headers, *rest)


def header_names(headers: Iterable[str]) -> tuple[str, ...]:
    """Return which of a message's *headers* are to be found in its task's request."""
    return tuple(name for name in headers if name not in _NOT_HEADERS)


def _headers_of(request: Any, received: Received) -> dict[str, Any]:
    facts = request.__dict__
    names = received.headers
    if names is None:  # no worker has made it
        names = header_names(name for name in facts if name[0] != "_")
    return {name: facts[name] for name in names if name in facts}


def _can_be_sent(value: Any) -> bool:
    try:
        dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def arguments_that_came(request: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of *request*, whatever the task's body has made of them."""
    received = Received.of(request)
    if received.body is None:
        return request.args or (), request.kwargs or {}
    kind, encoding = received.content_type or "", received.content_encoding or "utf-8"
    args, kwargs, _ = deserialize(received.body, kind, encoding, accept=[kind])
    return args, kwargs


def seal_message(message: Message, lock_header: LockHeader) -> bytes:
    """Return *message* as it was received by a worker, and *lock_header* in its header."""
    content: Any = message.content_type, message.content_encoding, message.body
    properties, delivery = message.properties or {}, message.delivery_info or {}
    return _sealed(dict(message.headers), properties, content, delivery, lock_header)


class Content(NamedTuple):
    """A body that is serialized."""

    kind: str
    encoding: str
    body: Any

    @classmethod
    def of(cls, serialized: Sequence[Any]) -> "Content":
        """Return what kombu has serialized."""
        return cls(*serialized)


def seal_call(content: Content, how: Mapping[str, Any], lock_header: LockHeader) -> bytes:
    """
    Return the message that a producer would publish, and *lock_header* in its header.

    Args:
        content: Its body.
        how: The other arguments of `kombu.Producer.publish`.
        lock_header: See there.
    """
    headers, exchange = dict(how["headers"]), how.get("exchange") or ""
    properties = {name: value for name, value in how.items() if name not in _OPTIONS}
    mode = how.get("delivery_mode") or getattr(exchange, "delivery_mode", None)
    properties["delivery_mode"] = maybe_delivery_mode(mode)
    properties["priority"] = how.get("priority") or 0
    if (expiration := how.get("expiration")) is not None:
        properties["expiration"] = str(int(expiration * 1000))
    if (reply_to := properties.get("reply_to")) is not None:
        properties["reply_to"] = getattr(reply_to, "name", reply_to)
    if compression := how.get("compression"):
        encoder: Any = get_encoder(compression)
        headers["compression"] = encoder[1]
    delivery = {
        "exchange": str(getattr(exchange, "name", exchange)),
        "routing_key": how.get("routing_key"),
    }
    return _sealed(headers, properties, content, delivery, lock_header)


def _sealed(
    headers: dict[str, Any],
    properties: Mapping[str, Any],
    content: tuple[str, str, Any],
    delivery: Mapping[str, Any],
    lock_header: LockHeader,
) -> bytes:
    content_type, content_encoding, body = content
    text = isinstance(body, str)
    raw: bytes = body.encode() if text else body
    message = {
        "headers": {**headers, HEADER: lock_header.to_header(headers.get("retries") or 0)},
        "properties": {k: v for k, v in properties.items() if k not in _NOT_PROPERTIES},
        "content_type": content_type,
        "content_encoding": content_encoding or "utf-8",  # as kombu reads what does not say
        "body": base64.b64encode(raw).decode(),
        "text": text,
        "exchange": delivery.get("exchange") or "",
        "routing_key": delivery.get("routing_key") or "",
    }
    return dumps(message).encode()


def destination_of(exchange: str, routing_key: str) -> str:
    """Return in one text where a message is sent."""
    return f"{exchange} {routing_key}"


def execution_id(headers: Mapping[str, Any]) -> str:
    """Return the id of the execution that a message with these *headers* is for."""
    execution = ExecutionId(
        headers["id"],
        headers.get("retries") or 0,
        LockHeader.of(headers).number,
        headers.get("replaced_task_nesting") or 0,
    )
    return str(execution)


def with_eta(envelope: bytes, delay: float) -> bytes:
    """Return *envelope* to be executed in *delay* seconds."""
    message = loads(envelope)
    message["headers"]["eta"] = when(delay)
    return dumps(message).encode()


def when(delay: float) -> str:
    """Return the time in *delay* seconds as Celery writes an ETA."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=delay)
    return at.isoformat()


def seconds_until(at: Any) -> float:
    """
    Return the seconds until a time, which may be a text, or so many seconds; 0 if it is over.

    Celery takes a time without a zone as UTC.
    """
    if isinstance(at, str | datetime.datetime):
        now = datetime.datetime.now(datetime.UTC)
        at = (maybe_make_aware(maybe_iso8601(at) or now) - now).total_seconds()
    return max(0.0, float(at or 0))


def to_message(app: Celery, message: Mapping[str, Any], *, returned: bool = False) -> Message:
    """
    Return the message that a worker would receive, without a broker behind it.

    Args:
        app: Says what content it accepts.
        message: An envelope, decoded.
        returned: As in `LockHeader`.
    """
    # A parked body is not compressed any more, whatever the header says; kombu would believe it.
    headers = _headers(message, returned)
    compression = headers.pop("compression", None)
    made = Message(
        body=_body(message),
        delivery_tag=uuid.uuid4().hex,
        content_type=message["content_type"],
        content_encoding=message["content_encoding"],
        headers=headers,
        properties=dict(message["properties"]),
        delivery_info={
            "exchange": message["exchange"],
            "routing_key": message["routing_key"],
            "redelivered": False,
        },
        accept=accepted_content(app),
    )
    Received.note(made, pushed=True)
    if compression is not None:
        made.headers["compression"] = compression
    return made


def accepted_content(app: Celery) -> Any:
    """Return the content types that *app* accepts, as kombu compares them."""
    return _accepted(tuple(app.conf.accept_content))


@functools.cache
def _accepted(content: tuple[str, ...]) -> Any:
    return prepare_accept_content(content)


def publish(
    app: Celery, envelope: bytes, *, returned: bool = False, exchange_type: str = ""
) -> None:
    """
    Send *envelope* to the queue that it came from.

    Args:
        app: The app.
        envelope: The envelope.
        returned: As in `LockHeader`.
        exchange_type: As in `Received`.

    Raises:
        MalformedError: It cannot be sent: it is spoilt.
        kombu.exceptions.OperationalError: The broker does not take it, by the app's retry policy.
    """
    try:
        built = _build(loads(envelope), returned)
    except Exception as error:
        raise MalformedError(repr(error)) from error
    exchange = built["exchange"]
    # kombu's Redis transport drops a message to an exchange that this connection has not declared.
    declare = [
        queue
        for queue in list(dict.values(app.amqp.queues))  # another thread may add one
        if exchange and exchange in {place.name for place in places_of(queue)}
    ]
    with forks.no_fork(), app.producer_or_acquire() as producer:
        try:
            if exchange and exchange_type and not declare:
                _make_known(producer.channel, exchange, exchange_type)
            producer.publish(
                **built,
                declare=declare,
                retry=app.conf.task_publish_retry,
                retry_policy=app.conf.task_publish_retry_policy,
            )
        except OperationalError:
            raise
        except broker_errors(producer.connection) as error:  # as they come without retries
            raise OperationalError(str(error)) from error


def broker_errors(connection: Any) -> tuple[type[Exception], ...]:
    """Return what is raised where the broker of *connection* does not take a message."""
    if connection is None:  # its producer's channel was closed
        return (OperationalError,)
    return (
        OperationalError,
        *connection.connection_errors,
        *connection.channel_errors,
        *connection.recoverable_connection_errors,  # here amqp has that it was refused
        *connection.recoverable_channel_errors,
    )


def is_refusal(error: OperationalError) -> bool:
    """Whether the broker is there, and says that it does not take the message."""
    return isinstance(error.__cause__, (MessageNacked, ChannelError))


def broker_reason(error: BaseException) -> str:
    """Return what the broker, or the way to it, has said; some of these errors have no text."""
    cause = (isinstance(error, OperationalError) and error.__cause__) or error
    return ": ".join(filter(None, (type(cause).__name__, str(cause))))


def _headers(message: Mapping[str, Any], returned: bool) -> dict[str, Any]:
    """Return the headers of an envelope, and that it is *returned* among them."""
    headers = dict(message["headers"])
    if returned and isinstance(way := headers.get(HEADER), Mapping):
        headers[HEADER] = {**way, "returned": True}
    return headers


def _build(message: Mapping[str, Any], returned: bool) -> dict[str, Any]:
    """Return the arguments to publish *message*; raise anything at all if that is impossible."""
    headers, properties = _headers(message, returned), dict(message["properties"])
    expiration = properties.pop("expiration", None)
    built = {
        "body": _body(message),
        "exchange": message["exchange"],
        "routing_key": message["routing_key"],
        "content_type": message["content_type"],
        "content_encoding": message["content_encoding"],
        "headers": headers,
        "compression": headers.pop("compression", None),
        "priority": properties.pop("priority", None),
        "delivery_mode": properties.pop("delivery_mode", None),
        "expiration": int(expiration) / 1000 if expiration else None,
    }
    for name in ("exchange", "routing_key", "content_type", "content_encoding"):
        _require(built, name, str)
    for name in ("priority", "delivery_mode"):
        _require(built, name, int, type(None))
    for name in _TEXTS:
        _require(properties, name, str, type(None))
    if options := _OPTIONS & properties.keys():
        raise TypeError(f"no property may be named {options}")
    if isinstance(built["body"], str):
        built["body"].encode(built["content_encoding"] or "utf-8")
    if built["compression"]:
        get_encoder(built["compression"])
    return {**built, **properties}


def _require(facts: Mapping[str, Any], name: str, *kinds: type) -> None:
    if name in facts and not isinstance(facts[name], kinds):
        raise TypeError(f"{name} is {facts[name]!r}")


def places_of(queue: Any) -> list[Any]:
    """Return the exchanges that *queue* is bound to."""
    exchanges = [queue.exchange, *(bound.exchange for bound in queue.bindings or ())]
    return [exchange for exchange in exchanges if exchange is not None]


def _make_known(channel: Any, exchange: str, exchange_type: str) -> None:
    """Let kombu know an exchange where it delivers messages itself; a broker knows its own."""
    if isinstance(channel, virtual.Channel) and exchange not in (channel.state.exchanges or ()):
        # Durable as kombu's are by default: it refuses one who declares it otherwise than before.
        channel.exchange_declare(exchange, exchange_type, durable=True)


def _body(message: Mapping[str, Any]) -> Any:
    body = base64.b64decode(message["body"])
    return body.decode() if message["text"] else body
