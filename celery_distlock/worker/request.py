"""What the worker's main process knows of a message and hands on to the process that runs it."""

from typing import Any

from celery.worker.request import Request

from celery_distlock.envelope import HEADER

__all__ = ["LockedRequest"]

# What kombu cannot write again once it has read it: YAML's dumper refuses Celery's signatures.
_KEEP_BODY = frozenset({"application/x-yaml"})


class LockedRequest(Request):
    """A request that lets its task be parked as it came."""

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        received = {
            "content_type": message.content_type,
            "content_encoding": message.content_encoding,
        }
        if message.content_type in _KEEP_BODY:
            received["body"] = message.body
        facts = self.request_dict
        facts["properties"] = {**facts["properties"], HEADER: received}
