"""
Tracers in processes of their own: sentry-sdk and ddtrace as their users have them, sending nothing.

``DISTLOCK_TEST_TRACER`` names the one that a process is instrumented with. They are installed where
no other test sees them, for they change what they find, pytest included.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "DISTLOCK_TEST_TRACER"
PACKAGES = {"sentry": "sentry_sdk", "datadog": "ddtrace"}
PATH = os.pathsep.join(map(str, (ROOT, ROOT / ".venvs/tracers")))


finished: list[str] = []  # ids of the spans of this process that have ended


def environment(tracer: str) -> dict[str, str]:
    """What a process has that is instrumented with *tracer*."""
    return {
        VARIABLE: tracer,
        "PYTHONPATH": PATH,
        "DD_CELERY_DISTRIBUTED_TRACING": "true",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        "DD_REMOTE_CONFIGURATION_ENABLED": "false",
        "DD_CRASHTRACKING_ENABLED": "false",
    }


def why_not(tracer: str) -> str:
    """Return why there is no *tracer*, or nothing."""
    trial = subprocess.run(
        [sys.executable, "-c", f"import {PACKAGES[tracer]}"],
        env={**os.environ, **environment(tracer)},
        capture_output=True,
        text=True,
        check=False,
    )
    return trial.stderr.strip().rpartition("\n")[2] if trial.returncode else ""


def instrument() -> None:
    """Do so, if the environment says with what; as an app's module does, once it has its app."""
    if name := os.environ.get(VARIABLE):
        {"sentry": _instrument_with_sentry, "datadog": _instrument_with_datadog}[name]()


def _instrument_with_sentry() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class Nowhere(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            if (event := envelope.get_transaction_event()) is not None:
                spans = [event["contexts"]["trace"], *event["spans"]]
                finished.extend(span["span_id"] for span in spans)

    sentry_sdk.init(
        "https://key@sentry.invalid/1",
        transport=Nowhere,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        default_integrations=False,
    )


def _instrument_with_datadog() -> None:
    from ddtrace import patch
    from ddtrace.trace import TraceFilter, tracer

    class Nowhere(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            finished.extend(str(span.span_id) for span in trace)

    tracer.configure(trace_processors=[Nowhere()])
    patch(celery=True)


def ids() -> dict[str, str] | None:
    """Return the ids of the trace that this code is in, and of the span that its process joined."""
    name = os.environ.get(VARIABLE)
    if name == "sentry":
        import sentry_sdk

        span: Any = sentry_sdk.get_current_scope().transaction
        return {"trace": span.trace_id, "parent": span.parent_span_id}
    if name == "datadog":
        from ddtrace.trace import tracer

        span = tracer.current_root_span()
        return {"trace": f"{span.trace_id:x}", "parent": str(span.parent_id)}
    return None


@contextmanager
def trace() -> Iterator[None]:
    """Begin a trace, as a request to a web process does."""
    if os.environ[VARIABLE] == "sentry":
        import sentry_sdk

        with sentry_sdk.start_transaction(name="web"):
            yield
    else:
        from ddtrace.trace import tracer

        with tracer.trace("web"):
            yield
