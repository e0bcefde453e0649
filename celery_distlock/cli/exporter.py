"""``celery -A proj locks exporter``: metrics for Prometheus."""

import signal
import threading
from typing import Any

import click

from celery_distlock.errors import StoreError
from celery_distlock.runtime import Runtime

__all__ = ["exporter"]


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", default=9750, show_default=True, help="The port; 0: a free one.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.0),
    default=5.0,
    show_default=True,
    help="Seconds between looks at the store, at least.",
)
@click.pass_context
def exporter(ctx: click.Context, host: str, port: int, every: float) -> None:
    """
    Serve metrics for Prometheus, until it is stopped.

    They are read from the store: held keys, who waits and for how long, how long waits and holds
    were, conflicts, lost locks, by task. One exporter is enough for all workers of a store.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server

        from celery_distlock.exporter import StoreCollector
    except ImportError as error:
        raise click.ClickException(
            "it needs prometheus-client: pip install 'celery-distlock[metrics]'"
        ) from error
    app: Any = ctx.obj.app
    app.loader.import_default_modules()  # the tasks, whose counters begin with 0
    app.finalize()
    registry = CollectorRegistry()
    registry.register(StoreCollector(app, every=every))
    stopped = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stopped.set())
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error.strerror}") from error
    store = Runtime.of(app).store
    where = store.identity.rpartition("#")[0]
    try:
        store.inspect("", 1.0)
    except StoreError as error:
        click.echo(f"{where} does not answer now: {error}", err=True)
    click.echo(f"metrics of {where} at http://{host}:{server.server_port}/metrics")
    stopped.wait()
    server.shutdown()
    thread.join()
    server.server_close()
