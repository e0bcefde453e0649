"""
OpenTelemetry spans for waiting and holding, if OpenTelemetry is in use.

``lock wait`` lasts from the first request for the key, which another worker may have made, to the
grant; ``lock hold`` from the grant to the release. Both are children of the span that is current
at the grant: in a task, the span of its execution. A lost lock is an error of its ``lock hold``.

The spans are created in a thread, with the times and the context of the event. A span processor or
exporter that hangs or raises there does not affect the task.
"""

import atexit
import functools
import sys
import time
from collections.abc import Mapping
from typing import Any

from celery_distlock.process.background import LAST_MOMENT, BackgroundNotifier
from celery_distlock.process.forks import ForkStage, at_fork

MOST = 10_000  # open spans

_open: dict[str, Any] = {}  # spans of the current holds of this process, by holder
_ENDS = {"lock_released", "lock_lost"}
_RECORDED = {"lock_acquired", "lock_changed", *_ENDS}

_notifier = BackgroundNotifier("distlock-spans")


def observe(name: str, task: str, facts: Mapping[str, Any]) -> None:
    """Queue the start or the end of the spans for the signal *name*."""
    if name in _RECORDED:
        _catch_up_at_exit()
        context = sys.modules["opentelemetry.context"].get_current()
        call = functools.partial(_record, name, task, facts, time.time_ns(), context)
        _notifier.submit(call)


@functools.cache
def _catch_up_at_exit() -> None:
    """At exit, create the last spans before the provider, registered earlier, shuts down."""
    atexit.register(_notifier.catch_up, LAST_MOMENT)


def _record(name: str, task: str, facts: Mapping[str, Any], now: int, context: Any) -> None:
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
    wait = tracer.start_span("lock wait", start_time=asked_at, **more)
    wait.set_attribute("distlock.waited_for", facts["waited_for"])
    wait.end(now)
    span = tracer.start_span("lock hold", start_time=now, **more)
    if span.is_recording():
        while len(_open) >= MOST:  # their ends were not reported
            _open.pop(next(iter(_open))).end()
        _open[facts["holder"]] = span


def _much(facts: Mapping[str, Any]) -> dict[str, int]:
    names = facts.keys() & {"token", "units", "capacity"}
    return {f"distlock.{name}": facts[name] for name in names}


at_fork(_open.clear, ForkStage.TELEMETRY)
