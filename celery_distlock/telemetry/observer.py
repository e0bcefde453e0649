"""
Turns each signal into counters, events and spans.

:func:`observe` is called inside acquire and release, where a time limit may expire at any moment
and the next holder waits. So it only queues the signal; a thread does the rest.
"""

import logging
import os
import sys
from collections import deque
from typing import Any

from celery.signals import worker_process_shutdown

from celery_distlock.naming import shown
from celery_distlock.process.background import BackgroundNotifier, finish_all
from celery_distlock.process.forks import ForkStage, at_fork
from celery_distlock.stores import Store

from . import events, tracing
from .counters import Counters

logger = logging.getLogger(__name__)

MOST = 100_000  # signals queued between two rounds; beyond that, the oldest are not counted

_NAMED = "OTEL_PYTHON_TRACER_PROVIDER" in os.environ  # where the API looks for a provider

_seen: deque[tuple[str, Any, Store, dict[str, Any]]] = deque(maxlen=MOST)


def observe(name: str, sender: Any, store: Store, facts: dict[str, Any]) -> None:
    """
    Queue a signal to be counted, sent as an event and traced.

    Args:
        name: The name of the signal, or ``swept``.
        sender: A task, a lock, or an app.
        store: The store of the lock.
        facts: The signal's other arguments.
    """
    _seen.append((name, sender, store, facts))
    if _notifier.calls is None:
        _notifier.start()
    traced, sent = is_traced(), events.source is not None
    if traced or sent:
        facts_shown = {**facts, "key": shown(facts["key"])} if "key" in facts else facts
        if traced:
            tracing.observe(name, _task_of(sender), facts_shown)
        if sent:
            with_state = getattr(sender, "send_events", True)
            events.send(name, _task_of(sender), facts_shown, with_state=with_state)


def is_traced() -> bool:
    """Whether OpenTelemetry is imported and has a provider, without which spans are not kept."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return False
    provider = getattr(trace, "get_tracer_provider", None)  # another thread may be importing it
    # Without one, that function looks for it in the environment, which takes longer than the rest.
    if getattr(provider, "__globals__", {}).get("_TRACER_PROVIDER", trace) is None and not _NAMED:
        return False
    proxy = getattr(trace, "ProxyTracerProvider", None)
    return provider is not None and proxy is not None and not isinstance(provider(), proxy)


def flush() -> None:
    """Add the counts so far to the stores now; a thread does so every two seconds."""
    _notifier.go_round()


def _count() -> None:
    counters = Counters()
    while _seen:
        name, sender, store, facts = _seen.popleft()
        try:
            counters.add(store, name, _task_of(sender), facts)
        except Exception as error:  # noqa: BLE001  # the next one is counted
            key = shown(str(facts.get("key")))
            logger.debug("the signal %s of %r was not counted: %r", name, key, error)
    counters.flush()


def _task_of(sender: Any) -> str:
    return str(getattr(sender, "name", ""))  # locks and apps have none


_notifier = BackgroundNotifier("distlock-counts", _count)
worker_process_shutdown.connect(finish_all)
at_fork(_seen.clear, ForkStage.TELEMETRY)  # the parent counts its own signals
