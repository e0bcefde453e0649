"""
What the package itself makes of each signal: counts, events and spans.

Where it happens, it is only noted: this is code inside of acquire and release, where a time limit
may strike at any moment and the next one waits.
"""

import logging
from collections import deque
from typing import Any

from celery.signals import worker_process_shutdown

from celery_distlock.naming import shown
from celery_distlock.process.background import BackgroundNotifier, finish_all
from celery_distlock.process.forks import ForkStage, begin_anew
from celery_distlock.stores import Store

from . import events, tracing
from .counters import Counters

__all__ = ["flush", "observe"]

logger = logging.getLogger(__name__)

MOST = 100_000  # things seen between two rounds; what is more than that is not counted

_seen: deque[tuple[str, Any, Store, dict[str, Any]]] = deque(maxlen=MOST)


def observe(name: str, sender: Any, store: Store, facts: dict[str, Any]) -> None:
    """
    Take note of a signal.

    Args:
        name: The signal's, or ``swept``.
        sender: A task, a lock, or an app.
        store: where it happened.
        facts: The signal's other arguments.
    """
    _seen.append((name, sender, store, facts))
    _notifier.start()
    if tracing.wanted() or events.wanted():
        told = {**facts, "key": shown(facts["key"])} if "key" in facts else facts
        if tracing.wanted():
            tracing.observe(name, _task_of(sender), told)
        if events.wanted():
            events.send(name, _task_of(sender), told)


def flush() -> None:
    """Tell the stores what was seen until now; it is done every two seconds anyway."""
    _notifier.go_round()


def _tell() -> None:
    tally = Counters()
    while _seen:
        name, sender, store, facts = _seen.popleft()
        try:
            tally.add(store, name, _task_of(sender), facts)
        except Exception as error:  # noqa: BLE001  # whatever is wrong with one, the next is counted
            key = shown(str(facts.get("key")))
            logger.debug("%s of %r is not counted: %r", name, key, error)
    tally.tell()


def _task_of(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # locks and apps have none


_notifier = BackgroundNotifier("distlock-counts", _tell)
worker_process_shutdown.connect(finish_all)
begin_anew(_seen.clear, ForkStage.TELEMETRY)  # what the parent has seen, it reports itself
