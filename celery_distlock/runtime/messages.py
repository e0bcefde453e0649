"""
Converts a received message to an envelope, which is parked or sent again, and back.

Celery's own ways of sending a task again (``retry``, ``signature_from_request``) change it: they
count a retry, drop the compression, and lose routing. An envelope keeps everything but the delivery
tag.
"""

import base64
import contextlib
import datetime
import functools
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from celery import Celery
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.compression import get_encoder
from kombu.entity import maybe_delivery_mode
from kombu.message import Message
from kombu.serialization import dumps as serialize
from kombu.serialization import loads as deserialize
from kombu.serialization import prepare_accept_content, registry  # type: ignore[attr-defined]
from kombu.utils.json import dumps, loads

from .message_facts import ADDRESSEE, HEADER, PROPERTY, LockHeader, Received

__all__ = [
    "Content",
    "MalformedError",
    "accepted_content",
    "addressed",
    "arguments_that_came",
    "destination_of",
    "leaves_in",
    "publishing_of",
    "seal",
    "seal_call",
    "seal_message",
    "seconds_left",
    "seconds_until",
    "to_message",
    "when",
    "with_eta",
    "with_header",
]

# Options of `kombu.Producer.publish`, which no property may be named like. Listed here because
# monitoring agents replace that function, so its signature cannot be read.
_OPTIONS = frozenset(
    {
        *("self", "body", "routing_key", "delivery_mode", "mandatory", "immediate", "priority"),
        *("content_type", "content_encoding", "serializer", "headers", "compression", "exchange"),
        *("retry", "retry_policy", "declare", "expiration", "timeout", "confirm_timeout"),
        "properties",
    }
)

# Seconds for which a message is parked at least, where two clocks differ about its time.
SOONEST = 0.05
_TEXTS = ("correlation_id", "reply_to", "message_id", "type", "user_id", "app_id", "cluster_id")

_NOT_PROPERTIES = frozenset(
    {
        *("delivery_info", "delivery_tag", "body_encoding", PROPERTY),
        *("content_type", "content_encoding", "application_headers"),  # AMQP has them among these
        # SQS options of one sending: SQS silently drops a second message with the same id within
        # five minutes, and would delay a received message again.
        *("MessageDeduplicationId", "DelaySeconds", "delay_seconds"),
    }
)

_OF_DEATHS = ("exchange", "queue", "reason")
# RabbitMQ's history of dead-lettering; `LockHeader.deaths` keeps the count.
_DEATHS = frozenset(
    {"x-death", *(f"x-{which}-death-{what}" for which in ("first", "last") for what in _OF_DEATHS)}
)


class MalformedError(ValueError):
    """An envelope is not a valid message, so it cannot be sent."""


def seal(request: Any, lock_header: LockHeader) -> bytes:
    """
    Return the message of *request* as an envelope, with *lock_header* in its headers.

    Content type, body and headers come from the worker's main process, see
    :mod:`celery_distlock.worker.request`.
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
    content = content_type, encoding, body
    headers = with_header(received.headers or {}, lock_header)
    return _sealed(headers, properties, content, request.delivery_info or {})


def arguments_that_came(request: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of *request* as received, before the task's body changed them."""
    received = Received.of(request)
    if received.body is None:
        return request.args or (), request.kwargs or {}
    kind, encoding = received.content_type or "", received.content_encoding or "utf-8"
    args, kwargs, _ = deserialize(received.body, kind, encoding, accept=[kind])
    return args, kwargs


def seal_message(message: Message, lock_header: LockHeader) -> bytes:
    """Return *message*, received by a worker, as an envelope with *lock_header* in its headers."""
    content: Any = message.content_type, message.content_encoding, message.body
    properties, delivery = message.properties or {}, message.delivery_info or {}
    return _sealed(with_header(message.headers, lock_header), properties, content, delivery)


class Content(NamedTuple):
    """A serialized body, with its content type and encoding."""

    kind: str
    encoding: str
    body: Any


def seal_call(content: Content, how: Mapping[str, Any]) -> bytes:
    """
    Return the message that a producer would publish.

    Args:
        content: Its body.
        how: The other arguments of `kombu.Producer.publish`; its headers are :func:`with_header`.
    """
    headers, exchange = how["headers"], how.get("exchange") or ""
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
        headers = {**headers, "compression": encoder[1]}
    delivery = {
        "exchange": str(getattr(exchange, "name", exchange)),
        "routing_key": how.get("routing_key"),
    }
    return _sealed(headers, properties, content, delivery)


def _sealed(
    headers: Mapping[str, Any],
    properties: Mapping[str, Any],
    content: tuple[str, str, Any],
    delivery: Mapping[str, Any],
) -> bytes:
    content_type, content_encoding, body = content
    text = isinstance(body, str)
    raw: bytes = body.encode() if text else body
    message = {
        "headers": headers,
        "properties": {k: v for k, v in properties.items() if k not in _NOT_PROPERTIES},
        "content_type": content_type,
        "content_encoding": content_encoding or "utf-8",  # kombu's default
        "body": base64.b64encode(raw).decode(),
        "text": text,
        "exchange": delivery.get("exchange") or "",
        "routing_key": delivery.get("routing_key") or "",
    }
    return dumps(message).encode()


def with_header(headers: Mapping[str, Any], lock_header: LockHeader) -> dict[str, Any]:
    """
    Return *headers* with *lock_header*.

    And without RabbitMQ's dead-letter history, which `LockHeader.deaths` counts.
    """
    kept = {name: value for name, value in headers.items() if name not in _DEATHS}
    kept[HEADER] = lock_header.to_header(headers)
    return kept


def destination_of(exchange: str, routing_key: str) -> str:
    """Return an exchange and a routing key as one text."""
    return f"{exchange} {routing_key}"


def with_eta(envelope: bytes, delay: float) -> bytes:
    """Return *envelope* with an ETA in *delay* seconds."""
    message = loads(envelope)
    message["headers"]["eta"] = when(delay)
    return dumps(message).encode()


def addressed(envelope: bytes, queue: str) -> bytes:
    """Return *envelope* addressed to *queue*: consumers of other queues drop their copies."""
    message = loads(envelope)
    message["headers"][HEADER][ADDRESSEE] = queue
    return dumps(message).encode()


def to_message(app: Celery, message: Mapping[str, Any], *, returned: bool = False) -> Message:
    """
    Return the message that a worker would receive, without a broker behind it.

    Args:
        app: The app whose accepted content types apply.
        message: A decoded envelope.
        returned: See `LockHeader`.
    """
    # A parked body is not compressed, although the header may claim that; kombu would trust it.
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


def _headers(message: Mapping[str, Any], returned: bool) -> dict[str, Any]:
    """Return the headers of an envelope, with `LockHeader.returned` set if *returned*."""
    headers = dict(message["headers"])
    if returned and isinstance(way := headers.get(HEADER), Mapping):
        headers[HEADER] = {**way, "returned": True}
    return headers


def publishing_of(envelope: bytes, *, returned: bool) -> dict[str, Any]:
    """
    Return the arguments to publish *envelope*.

    Raises:
        MalformedError: The envelope is not a valid message.
    """
    try:
        return _build(loads(envelope), returned)
    except Exception as error:
        raise MalformedError(repr(error)) from error


def _build(message: Mapping[str, Any], returned: bool) -> dict[str, Any]:
    """Return the arguments to publish *message*; raise any exception if it is malformed."""
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


def _body(message: Mapping[str, Any]) -> Any:
    body = base64.b64decode(message["body"])
    return body.decode() if message["text"] else body


def when(delay: float) -> str:
    """Return the time in *delay* seconds as Celery writes an ETA."""
    at = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=delay)
    return at.isoformat()


def seconds_until(at: Any) -> float:
    """Return the seconds until *at*: a time as for `seconds_left`, or seconds; at least 0."""
    if at and isinstance(at, str | datetime.date):
        at = seconds_left(at)
    return max(0.0, float(at or 0))


def seconds_left(at: Any) -> float:
    """
    Return the seconds until a datetime, date or ISO 8601 text; negative if it has passed.

    Like Celery, treats a time without a time zone as UTC, not as the app's time zone.
    """
    aware: Any = maybe_make_aware(maybe_iso8601(_with_time(at)))  # type: ignore[arg-type]
    left: datetime.timedelta = aware - datetime.datetime.now(datetime.UTC)
    return left.total_seconds()


def leaves_in(timeout: float | None, since: float, expires: Any) -> float | None:
    """
    Return the seconds for which a message may still wait for its key; None: any time.

    Args:
        timeout: The seconds for which it may wait in all, from *since*; None: any time.
        since: In seconds since the epoch.
        expires: When it expires, as in its headers.
    """
    ends = [] if timeout is None else [since + timeout - time.time()]
    if expires:
        with contextlib.suppress(TypeError, ValueError, OverflowError):  # Celery reports it
            ends.append(seconds_until(expires))
    return max(SOONEST, min(ends)) if ends else None


def _with_time(at: Any) -> Any:
    """Return a date as the text that Celery sends, meaning midnight; anything else unchanged."""
    is_date = isinstance(at, datetime.date) and not isinstance(at, datetime.datetime)
    return at.isoformat() if is_date else at
