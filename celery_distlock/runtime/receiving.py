"""What a worker receives of a call's arguments: serializers give back other types."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from kombu import serialization
from kombu.serialization import dumps, loads

from celery_distlock.arguments import SCALARS
from celery_distlock.keys import Receive

from .current import Task
from .received import Received

__all__ = ["PLAIN_CONTENT", "receive_of_call", "receive_of_request"]

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
