"""What the package itself makes of each signal: counts, events and spans."""

import logging
from typing import Any

from celery import Celery

from . import events, tally, tracing
from .lock import Lock
from .runtime import Runtime

__all__ = ["observe"]

logger = logging.getLogger(__name__)


def observe(name: str, sender: Any, facts: dict[str, Any]) -> None:
    """Take note of a signal; never raises."""
    try:
        _observe(name, sender, facts)
    except Exception:
        logger.exception("%s of %r was not noted", name, facts.get("key"))


def _observe(name: str, sender: Any, facts: dict[str, Any]) -> None:
    if isinstance(sender, Lock):
        tally.note(sender._store, name, "", facts)
        tracing.observe(name, "", facts)
        return
    app: Celery = getattr(sender, "app", sender)  # a task's, or the app itself
    task = "" if app is sender else str(sender.name)
    tally.note(Runtime.of(app).store, name, task, facts)
    events.send(app, name, task, facts)
    tracing.observe(name, task, facts)
