"""The command ``celery locks web``: its options, and the checks before it starts."""

import ipaddress
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from celery_distlock.ops.cli import CommandError
from celery_distlock.ops.cli.ranges import DAY, PORT, Duration
from celery_distlock.ops.cli.single import admin_of
from celery_distlock.stores import Ability

TOKEN_VARIABLE = "DISTLOCK_WEB_TOKEN"  # noqa: S105
SHORTEST_TOKEN = 16  # characters: the token alone protects the locks from the network
NAME = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")  # a host name or an address
_NEEDED = ("starlette", "uvicorn")


def _checked_names(
    _ctx: click.Context, _param: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    """Refuse names that no Host header can have."""
    for name in names:
        if not NAME.fullmatch(name):
            raise click.BadParameter(f"{name!r} is not a host name: omit the scheme, port and path")
    return names


@click.command("web")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=PORT,
    default=8750,
    show_default=True,
    help="Port to listen on; 0: a free one.",
)
@click.option(
    "--token",
    envvar=TOKEN_VARIABLE,
    show_envvar=True,
    metavar="TEXT|auto",
    help="The token for logging in; auto generates one and prints it."
    " Other users of the machine can read a command line: prefer the environment.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    callback=_checked_names,
    metavar="NAME",
    help="Another host name of the page. May be repeated.",
)
@click.option("--read-only", is_flag=True, help="Disable all changes.")
@click.option(
    "--interval",
    type=Duration(0.2, DAY),
    default="2s",
    show_default=True,
    metavar="TIME",
    help="The time between two readings of the store: 0.5s, 10s, 1m.",
)
@click.pass_obj
def web(
    obj: Any,
    *,
    host: str,
    port: int,
    token: str | None,
    allowed_hosts: tuple[str, ...],
    read_only: bool,
    interval: float,
) -> None:
    """Show the locks on a web page."""
    server: Any = _server()
    if token is None:
        token = os.environ.get(TOKEN_VARIABLE)  # click 8.1 ignores an empty one
    given = secrets.token_urlsafe(24) if token == "auto" else token  # noqa: S105
    _check_token(host, given)
    options = server.Options(
        host,
        port,
        token=given,
        allowed_hosts=allowed_hosts,
        read_only=read_only,
        interval=interval,
    )
    admin_of(obj, Ability.LIST)
    try:
        page = server.Page(obj.app, options)
    except (OSError, UnicodeError) as error:
        raise CommandError(f"cannot listen on {host}:{port}: {error}") from error

    def report() -> None:
        click.echo(f"The locks are shown at {page.url} until Ctrl-C.")
        if token == "auto":  # noqa: S105
            click.echo(f"Token: {given}")

    # If KeyboardInterrupt is raised here, the server has shut down already.
    with page, _logged(), suppress(KeyboardInterrupt):
        page.serve(report)


def _server() -> Any:
    try:
        from . import server
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _NEEDED:
            raise
        raise CommandError(
            f"the page needs {missing}: pip install 'celery-distlock[web]'"
        ) from error
    return server


def _check_token(host: str, token: str | None) -> None:
    """Refuse to listen on a network without a token, and tokens that can be guessed."""
    if token is None and not _is_loopback(host):
        raise click.UsageError(
            f"without a token, anyone who can reach {host} could release locks: set"
            " DISTLOCK_WEB_TOKEN, or use --token auto"
        )
    if token == "":
        raise click.UsageError(
            "the token is empty: unset DISTLOCK_WEB_TOKEN if all users of this machine may use the"
            " page, or use --token auto"
        )
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise click.UsageError(
            f"the token is shorter than {SHORTEST_TOKEN} characters: use --token auto"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@contextmanager
def _logged() -> Iterator[None]:
    """Print the log of the page, with times."""
    logger, handler = logging.getLogger(__package__), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(message)s"))
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
