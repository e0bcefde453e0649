"""
Tracers in processes of their own, as their users have them: what they would send goes to a file.

``DISTLOCK_TEST_TRACER`` names the one that a process is instrumented with, and
``DISTLOCK_TEST_TRACED`` that file. They are installed where no other test sees them, for they
change what they find, pytest included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

VARIABLE = "DISTLOCK_TEST_TRACER"
FILE = "DISTLOCK_TEST_TRACED"
PACKAGES = {
    "sentry": "sentry_sdk",
    "datadog": "ddtrace",
    "opentelemetry": "opentelemetry.instrumentation.celery",
}
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
        {
            "sentry": _instrument_with_sentry,
            "datadog": _instrument_with_datadog,
            "opentelemetry": _instrument_with_opentelemetry,
        }[name]()


def _send(**facts: Any) -> None:
    line = json.dumps(facts, default=str) + "\n"
    with Path(os.environ[FILE]).open("ab", buffering=0) as file:  # one write, so lines are whole
        file.write(line.encode())


def sent(file: Path) -> list[dict[str, Any]]:
    """Return the spans and errors that all processes have sent to *file*, in their order."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _instrument_with_sentry() -> None:
    import sentry_sdk
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class ToFile(Transport):
        def capture_envelope(self, envelope: Any) -> None:
            for item in envelope.items:
                if item.type in ("event", "transaction"):
                    _send_of_sentry(item.payload.json)

    sentry_sdk.init(
        "https://key@sentry.invalid/1",
        transport=ToFile,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        auto_enabling_integrations=False,  # of what is installed here by chance
    )


def _send_of_sentry(event: dict[str, Any]) -> None:
    around = event["contexts"]["trace"]
    trace = around["trace_id"]
    if event.get("type") != "transaction":
        errors = [each["type"] for each in event.get("exception", {}).get("values", [])]
        name = errors[-1] if errors else event["logentry"]["formatted"]
        _send(kind="error", trace=trace, name=name)
        return
    for span in [{**around, "description": event["transaction"]}, *event["spans"]]:
        finished.append(span["span_id"])
        _send(
            kind="span",
            trace=trace,
            id=span["span_id"],
            parent=span.get("parent_span_id"),
            name=f"{span['op']} {span['description']}",
            status=span.get("status"),
            facts=span.get("data", {}),
        )


def _instrument_with_datadog() -> None:
    from ddtrace import patch
    from ddtrace.trace import TraceFilter, tracer

    class ToFile(TraceFilter):
        def process_trace(self, trace: Any) -> None:
            for span in trace:
                finished.append(str(span.span_id))
                _send(
                    kind="span",
                    trace=f"{span.trace_id:x}",
                    id=str(span.span_id),
                    parent=str(span.parent_id),
                    name=f"{span.name} {span.resource}",
                    status="error" if span.error else "",
                    facts=dict(span.get_tags()),
                )

    tracer.configure(trace_processors=[ToFile()])
    patch(celery=True)


def _instrument_with_opentelemetry() -> None:
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans: Any) -> Any:
            for span in spans:
                finished.append(f"{span.context.span_id:016x}")
                _send(
                    kind="span",
                    trace=f"{span.context.trace_id:032x}",
                    id=f"{span.context.span_id:016x}",
                    parent=f"{span.parent.span_id:016x}" if span.parent else None,
                    name=span.name,
                    status=span.status.status_code.name,
                    facts=dict(span.attributes),
                )
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToFile()))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


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
    if name == "opentelemetry":
        from opentelemetry.trace import get_current_span

        span = get_current_span()
        parent = f"{span.parent.span_id:016x}" if span.parent else ""
        return {"trace": f"{span.context.trace_id:032x}", "parent": parent}
    return None


@contextmanager
def trace() -> Iterator[None]:
    """Begin a trace, as a request to a web process does."""
    name = os.environ[VARIABLE]
    if name == "sentry":
        import sentry_sdk

        with sentry_sdk.start_transaction(name="web"):
            yield
    elif name == "datadog":
        from ddtrace.trace import tracer

        with tracer.trace("web"):
            yield
    else:
        from opentelemetry.trace import get_tracer

        with get_tracer("web").start_as_current_span("web"):
            yield
