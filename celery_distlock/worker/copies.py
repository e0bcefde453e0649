"""Leaves to other workers what these send again to themselves, where each worker gets a copy."""

import logging
from collections.abc import Callable
from typing import Any

from celery.utils.imports import symbol_by_name

from celery_distlock.runtime.lock_header import addressee_of
from celery_distlock.runtime.routing import taken_queues

from . import refusal
from .request import locked_request

__all__ = ["strategy"]

logger = logging.getLogger(__name__)


def strategy(task: Any, app: Any, consumer: Any, **options: Any) -> Callable[..., Any]:
    """Return what Celery calls with every message for *task*."""
    task.Request = locked_request(symbol_by_name(task.Request))  # it may be a user's own
    receive = refusal.strategy(task, app, consumer, **options)

    def on_message(
        message: Any, body: Any, ack: Any, reject: Any, callbacks: Any, **more: Any
    ) -> Any:
        queue = addressee_of(message.headers) if body is None else ""
        if queue and queue not in taken_queues(app):
            return ack(logger, consumer.connection_errors)
        return receive(message, body, ack, reject, callbacks, **more)

    return on_message
