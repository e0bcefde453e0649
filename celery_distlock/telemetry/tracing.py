"""
OpenTelemetry spans for waiting and holding, where opentelemetry is in use.

``lock wait`` is from the first time that the key was asked for, which may be in another worker, to
the grant; ``lock hold`` from there to the release. Both are children of the span in which the key
was granted, in a task that of its run. A lost lock is an error of its ``lock hold``.

They are made in a thread, with the times and the context of where it happened: what a processor or
an exporter of spans does there, hang or raise, is none of the task's.
"""

import atexit
import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

from celery_distlock.process.background import LAST_MOMENT, BackgroundNotifier
from celery_distlock.process.forks import ForkStage, begin_anew

__all__ = ["observe", "wanted"]

MOST = 10_000  # spans that are open at once

_open: dict[str, Any] = {}  # the spans of what is held here, by holder
_ENDS = {"lock_released", "lock_lost"}
_TOLD = {"lock_acquired", "lock_changed", *_ENDS}

_notifier = BackgroundNotifier("distlock-spans")


def wanted() -> bool:
    """Whether OpenTelemetry is imported and has a provider; if not, nobody collects spans."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    provider = getattr(trace, "get_tracer_provider", None)  # another thread may import it just now
    proxy = getattr(trace, "ProxyTracerProvider", None)
    return provider is not None and proxy is not None and not isinstance(provider(), proxy)


def observe(name: str, task: str, facts: Mapping[str, Any]) -> None:
    """Begin or end the spans that the signal *name* is about, soon."""
    if name in _TOLD:
        _catch_up_at_exit()
        context = sys.modules["opentelemetry.context"].get_current()
        told = functools.partial(_tell, name, task, facts, time.time_ns(), context)
        _notifier.submit(told)


@functools.cache
def _catch_up_at_exit() -> None:
    """At the process's end, make the last spans before their provider shuts down: it came first."""
    atexit.register(_notifier.catch_up, LAST_MOMENT)


def _tell(name: str, task: str, facts: Mapping[str, Any], now: int, context: Any) -> None:
    trace: Any = sys.modules["opentelemetry.trace"]
    if name == "lock_acquired":
        _begin(trace, task, facts, now, context)
    elif name == "lock_changed" and (span := _open.get(facts["holder"])) is not None:
        span.set_attributes(_much(facts))
    elif name in _ENDS and (span := _open.pop(facts["holder"], None)) is not None:
        if name == "lock_lost":
            span.set_status(trace.StatusCode.ERROR, str(facts["reason"]))
        span.end(now)


def _begin(trace: Any, task: str, facts: Mapping[str, Any], now: int, context: Any) -> None:
    tracer = trace.get_tracer("celery_distlock")
    attributes = {
        "distlock.key": str(facts["key"]),
        "distlock.holder": facts["holder"],
        **_much(facts),
    }
    if task:
        attributes["celery.task_name"] = task
        attributes["messaging.message.id"] = facts.get("task_id", "")
    asked_at = now - int(facts["waited"] * 1e9)
    more = {"context": context, "attributes": attributes}
    tracer.start_span("lock wait", start_time=asked_at, **more).end(now)
    span = tracer.start_span("lock hold", start_time=now, **more)
    if span.is_recording():
        while len(_open) >= MOST:  # holds that nobody has ended
            _open.pop(next(iter(_open))).end()
        _open[facts["holder"]] = span


def _much(facts: Mapping[str, Any]) -> dict[str, int]:
    told = facts.keys() & {"token", "units", "capacity"}
    return {f"distlock.{name}": facts[name] for name in told}


begin_anew(_open.clear, ForkStage.TELEMETRY)
