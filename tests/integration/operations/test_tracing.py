"""Spans for waiting and holding, with OpenTelemetry's own SDK."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from celery_distlock import Key, Lock
from celery_distlock.errors import LockLostError
from celery_distlock.stores import open_store
from celery_distlock.telemetry import observer, tracing

SHORT_LIFE = """
import sys
from celery import Celery
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from celery_distlock import Lock, install
from celery_distlock.stores import open_store

install(Celery())
provider = TracerProvider()
exporter = ConsoleSpanExporter(formatter=lambda span: span.name + ";")
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with Lock("k", store=open_store(*sys.argv[1:])):
    pass
"""


def make_all() -> None:
    """Wait until what was observed so far has its spans."""
    done = threading.Event()
    tracing._notifier.submit(done.set)
    assert done.wait(30)


@pytest.fixture
def spans(monkeypatch):
    """A function that returns the spans that have ended."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    def finished():
        make_all()
        return exporter.get_finished_spans()

    yield finished
    provider.shutdown()


def test_a_hold_is_a_span_with_its_key_and_token_after_one_for_the_wait(bare_site, spans, key):
    result = bare_site.tasks.look.apply(args=[key]).get()

    wait, hold = spans()
    assert (wait.name, hold.name) == ("lock wait", "lock hold")
    assert wait.end_time == hold.start_time
    for span in (wait, hold):
        assert span.attributes["distlock.key"] == key
        assert span.attributes["distlock.token"] == result["token"]
        assert span.attributes["celery.task_name"] == "tests.apps.locked.look"
        assert span.status.is_unset


@pytest.mark.usefixtures("bare_site")  # an app that has install(app)
def test_the_spans_show_how_much_is_held_and_when_that_changes(spans, redis_url, prefix):
    store = open_store(redis_url, prefix)
    with closing(store), Lock(Key("k", capacity=3, weight=2), store=store) as lease:
        at_first = spans()[0].attributes
        lease.upgrade(timeout=5)

    _, hold = spans()
    assert (at_first["distlock.units"], at_first["distlock.capacity"]) == (2, 3)
    assert (hold.attributes["distlock.units"], hold.attributes["distlock.capacity"]) == (1, 1)
    assert hold.attributes["distlock.token"] > at_first["distlock.token"]


def test_they_are_children_of_the_span_around(bare_site, spans, key):
    with trace.get_tracer("test").start_as_current_span("task") as around:
        bare_site.tasks.work_requeue.apply(args=[key])

    made = {span.name: span for span in spans()}
    wait, hold = made["lock wait"], made["lock hold"]
    assert wait.parent.span_id == hold.parent.span_id == around.get_span_context().span_id


def test_a_lost_lock_is_an_error_of_its_hold(bare_site, spans, key):
    lock = bare_site.lock(key)
    lock.acquire()
    bare_site.forget(key)
    with pytest.raises(LockLostError):
        lock.release()

    _, hold = spans()
    assert not hold.status.is_ok
    assert "no longer knew" in hold.status.description
    assert tracing._open == {}


def test_a_process_that_ends_at_once_has_made_all_its_spans(redis_url, prefix):
    script = [sys.executable, "-c", SHORT_LIFE, redis_url, prefix]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=60, check=True)

    assert ended.stdout == "lock wait;lock hold;"


@pytest.mark.parametrize("moment", ["on_start", "on_end"])
def test_what_raises_as_a_span_is_made_fails_no_task(bare_site, monkeypatch, key, moment):
    class Broken(SpanProcessor):
        pass

    def fail(*_: object, **__: object) -> None:
        raise OSError("the collector is unreachable")

    monkeypatch.setattr(Broken, moment, fail)
    provider = TracerProvider()
    provider.add_span_processor(Broken())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    assert bare_site.tasks.look.apply(args=[key]).successful()
    make_all()


def test_nothing_is_made_without_a_provider(request):
    assert not observer.is_traced()

    request.getfixturevalue("spans")

    assert observer.is_traced()


def test_a_provider_that_only_the_environment_names_is_found():
    looks = """
import opentelemetry.trace
from celery_distlock.telemetry import observer
print(observer.is_traced())
"""
    named = {**os.environ, "OTEL_PYTHON_TRACER_PROVIDER": "sdk_tracer_provider"}

    ran = subprocess.run([sys.executable, "-c", looks], env=named, capture_output=True, check=True)

    assert ran.stdout.strip() == b"True"
