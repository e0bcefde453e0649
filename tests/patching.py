"""
Patches Celery, kombu, redis and asyncio as agents for monitoring do.

``DISTLOCK_TEST_PATCHES="sentry before"`` names one of `AGENTS`, and whether it comes before this
package is imported, as ``ddtrace-run`` has it, or after, as in ``sentry_sdk.init()`` at the end of
an app's module.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import redis
import wrapt
from celery import Celery, Task, local, signals
from celery.app import trace
from celery.beat import Scheduler
from celery.canvas import Signature
from kombu import Producer

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AGENTS", "WRAPPERS", "calls", "patch"]

VARIABLE = "DISTLOCK_TEST_PATCHES"

calls: Counter[str] = Counter()  # what came through a patch, by its name

TARGETS = [
    *((Producer, name) for name in ("publish", "_publish")),
    *((Task, name) for name in ("__call__", "apply", "apply_async", "before_start", "delay")),
    *((Task, name) for name in ("retry", "run", "signature_from_request", "replace")),
    (Celery, "send_task"),
    (Signature, "apply_async"),
    (Scheduler, "apply_entry"),
    (trace, "build_tracer"),
    (asyncio.BaseEventLoop, "run_until_complete"),
    (asyncio.Handle, "_run"),
    (asyncio.Runner, "run"),
    (redis.Redis, "execute_command"),
    (redis.client.Pipeline, "execute"),
    *((redis.Connection, name) for name in ("send_command", "send_packed_command")),
]

# What `kombu.Producer.publish` takes, and what it takes them to be.
OPTIONS = [
    *("routing_key", "delivery_mode", "content_type", "content_encoding", "serializer", "headers"),
    *("compression", "exchange", "retry_policy", "declare", "expiration", "timeout"),
]
NUMBERED = {"mandatory": False, "immediate": False, "priority": 0, "retry": False}


def patch(when: str) -> None:
    """Patch, if the environment says that it is done at this time."""
    agent, _, wanted = os.environ.get(VARIABLE, "").partition(" ")
    if agent and when == wanted:
        AGENTS[agent]()


def _with(wrap: Callable[[Any], Any], *targets: tuple[Any, str]) -> None:
    for owner, name in targets:
        setattr(owner, name, wrap(getattr(owner, name)))


def _bare(real: Any) -> Any:
    name = real.__name__

    def patched(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return real(*args, **kwargs)

    return patched


def _like(real: Any) -> Any:
    return functools.wraps(real)(_bare(real))


def _proxy(real: Any) -> Any:
    return wrapt.FunctionWrapper(real, lambda wrapped, _, args, kwargs: wrapped(*args, **kwargs))


WRAPPERS = (_bare, _like, _proxy)


def _proxied(owner: Any, name: str, wrapper: Any = None) -> None:
    def count(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        calls[name] += 1
        return wrapped(*args, **kwargs)

    wrapt.wrap_function_wrapper(owner, name, wrapper or count)


def bare() -> None:
    """Replace everything by functions that hide what they call."""
    _with(_bare, *TARGETS)


def like() -> None:
    """Replace everything by functions that look like what they call."""
    _with(_like, *TARGETS)


def proxied() -> None:
    """Replace everything by object proxies."""
    for owner, name in TARGETS:
        _proxied(owner, name)


def sentry() -> None:
    """Hides `publish`; wraps a task's class when its tracer is made; nests the headers."""

    def with_headers(real: Any) -> Any:
        @functools.wraps(real)
        def send(*args: Any, **kwargs: Any) -> Any:
            calls[real.__name__] += 1
            headers = dict(kwargs.get("headers") or {})
            headers.update(agent="trace", headers={**headers.get("headers", {}), "agent": "trace"})
            return real(*args, **{**kwargs, "headers": headers})

        return send

    _with(_bare, (Producer, "publish"))
    _with(with_headers, (Task, "apply_async"), (Celery, "send_task"))
    _with(_like, (Scheduler, "apply_entry"))
    build_tracer = trace.build_tracer

    def build(name: Any, task: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(task, "_is_patched", False):
            kind = type(task)
            if trace.task_has_custom(task, "__call__"):
                kind.__call__ = _like(kind.__call__)
            else:
                task.run = _like(task.run)
            task._is_patched = True
        return _like(build_tracer(name, task, *args, **kwargs))

    trace.build_tracer = build


def newrelic() -> None:
    """Gives Celery's tracer a proxy of the task; publishes with every option that there is."""

    def publish(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        calls["publish"] += 1
        options = dict.fromkeys(OPTIONS) | NUMBERED | kwargs
        return wrapped(*args, **{**options, "headers": {"agent": "trace", **kwargs["headers"]}})

    def call(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        calls["__call__"] += 1
        return wrapped(*args, **kwargs)

    class Proxy(wrapt.FunctionWrapper):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            return self.__call__(*args, **kwargs)

    def build(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> Any:
        name, task, *rest = args
        proxy = Proxy(task, call)
        proxy.__module__ = __name__
        return wrapped(name, proxy, *rest, **kwargs)

    _proxied(Producer, "publish", publish)
    _proxied(trace, "build_tracer", build)
    local.Proxy.__call__ = Proxy(local.Proxy.__call__, call)


def datadog() -> None:
    """Has object proxies within Celery and kombu, and signals."""
    for owner, name in ((Producer, "_publish"), (Task, "apply_async"), (Scheduler, "apply_entry")):
        _proxied(owner, name)
    _by_signals(nested=True)


def signalled() -> None:
    """Adds headers by a signal alone, as Elastic APM and OpenTelemetry do."""
    _by_signals(nested=False)


def _by_signals(*, nested: bool) -> None:
    def add(headers: dict[str, Any], **_: Any) -> None:
        calls["before_task_publish"] += 1
        headers["agent"] = {"parent": "trace"}
        if nested:
            headers["headers"] = {**(headers.get("headers") or {}), "agent": "trace"}

    def begin(task: Any, **_: Any) -> None:
        calls["task_prerun"] += 1
        task._agent = "a span"

    def end(task: Any, **_: Any) -> None:
        del task._agent

    signals.before_task_publish.connect(add, weak=False)
    signals.task_prerun.connect(begin, weak=False)
    signals.task_postrun.connect(end, weak=False)


AGENTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (bare, like, proxied, sentry, newrelic, datadog, signalled)
}
