"""``celery -A proj locks exporter``: metrics for Prometheus."""

import re
import signal
import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any
from urllib.parse import parse_qsl

import click

from celery_distlock.errors import StoreError
from celery_distlock.runtime.app import Runtime
from celery_distlock.settings import closest
from celery_distlock.stores import Ability

from . import CommandError
from .ranges import DAY, PORT, Duration
from .single import admin_of

_CHOSEN = "name[]"  # parameter of prometheus-client that selects metrics
_ENDS = re.compile(r"_(total|created|bucket|sum|count)$")


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=PORT, default=9750, show_default=True, help="The port; 0: a free one.")
@click.option(
    "--every",
    type=Duration(0.0, DAY),
    default="5s",
    show_default=True,
    metavar="TIME",
    help="The least time between two readings of the store: 0.5s, 10s, 1m.",
)
@click.pass_context
def exporter(ctx: click.Context, host: str, port: int, every: float) -> None:
    """
    Serve metrics for Prometheus, until it is stopped.

    They are read from the store: held keys, waiters, durations of waits and holds, conflicts and
    lost locks, by task. One exporter is enough for all workers of a store.
    """
    try:
        from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

        from celery_distlock.ops.prometheus import StoreCollector, described
    except ImportError as error:
        raise CommandError(
            "the exporter needs prometheus-client: pip install 'celery-distlock[metrics]'"
        ) from error
    app: Any = ctx.obj.app
    admin_of(ctx.obj, Ability.LIST)
    Runtime.of(app).import_tasks()  # so that their counters start at 0
    registry = CollectorRegistry()
    registry.register(StoreCollector(app, every=every))
    stopped = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopped.set())
    try:
        server, thread = start_http_server(port, host, registry)
    except (OSError, UnicodeError) as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error
    server.set_app(only_metrics(make_wsgi_app(registry), [each.name for each in described()]))
    store = Runtime.of(app).store
    where = store.address
    try:
        store.inspect("", 1.0)
    except StoreError as error:
        click.echo(f"{where} does not answer now: {error}", err=True)
    click.echo(f"metrics of {where} at http://{host}:{server.server_port}/metrics")
    stopped.wait()
    server.shutdown()
    thread.join()
    server.server_close()


def only_metrics(serve: Callable[..., Any], known: Collection[str]) -> Callable[..., Any]:
    """
    Return a WSGI application that passes valid requests to *serve*, and refuses others.

    Args:
        serve: The application of prometheus-client, which ignores the path and other parameters.
        known: The names of all metrics.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status, why = _refusal(environ["PATH_INFO"], environ.get("QUERY_STRING", ""), known)
        if not status:
            served: Iterable[bytes] = serve(environ, start_response)
            return served
        start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [f"{why}\n".encode(errors="replace")]

    return answer


def _refusal(path: str, query: str, known: Collection[str]) -> tuple[str, str]:
    if path.rstrip("/") != "/metrics":
        return "404 Not Found", "the metrics are at /metrics"
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name != _CHOSEN:
            return "400 Bad Request", f"there is no parameter {name!r}: {_CHOSEN} selects metrics"
        if value not in known and _ENDS.sub("", value) not in known:
            return "400 Bad Request", f"there is no metric {value!r}: {closest(value, known)}"
    return "", ""
