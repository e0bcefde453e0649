"""``celery locks``: commands for operators, to inspect locks and to release stuck ones."""

import errno
import io
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import click
from celery.bin.base import CeleryCommand, CLIContext, handle_preload_options

from celery_distlock.errors import ConfigurationError, DistlockError

__all__ = ["locks"]

# Every `celery` command imports this module, so the others are imported on demand.
_COMMANDS = {
    "list": ".listing:list_",
    "show": ".single:show_",
    "queue": ".single:queue_",
    "release": ".single:release_",
    "recall": ".single:recall_",
    "wake": ".single:wake_",
    "tick": ".tick:tick_",
    "drop": ".single:drop_",
    "limit": ".limits:limit_",
    "pause": ".limits:pause_",
    "resume": ".limits:resume_",
    "top": ".top:top_",
    "doctor": ".doctor:doctor_",
    "exporter": ".exporter:exporter",
    "web": "..web.command:web",
}


CUT_OFF = 141  # a shell's status for a process ended by SIGPIPE


class CommandError(click.ClickException):
    """Ends a command with a one-line error and status 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Write the line to stderr."""
        from celery_distlock.naming import printable

        click.echo(f"Error: {printable(self.format_message())}", err=True)


class _Locks(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        found: click.Command = getattr(import_module(module, __name__), name)
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DistlockError as error:
            unnamed = isinstance(error, ConfigurationError) and not _names_an_app(ctx)
            hint = "no app was named, as in: celery -A proj locks; " if unnamed else ""
            raise CommandError(f"{hint}{error}") from error
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise
            # At exit, Python flushes stdout again and would report the error once more.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(CUT_OFF)  # click exits with 1, which has another meaning here


def _names_an_app(ctx: click.Context) -> bool:
    return bool(ctx.find_root().params.get("app", "that of manage.py"))


class _LogToStderr(logging.Handler):
    """Writes each log record of the package to stderr as one line."""

    def __init__(self, obj: CLIContext) -> None:
        super().__init__(logging.WARNING)
        self._obj = obj

    def emit(self, record: logging.LogRecord) -> None:
        from celery_distlock.naming import printable

        cause = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        self._obj.error(printable(f"{record.levelname.lower()}: {record.getMessage()}{cause}"))


@click.group(cls=_Locks, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--url",
    help="The lock store's URL, instead of the app's distlock_url. Do not put a password in it: the"
    " list of processes shows it.",
)
@click.option("--prefix", help="The prefix of all lock records, instead of the app's.")
@click.pass_context
@handle_preload_options
def locks(ctx: click.Context, url: str | None, prefix: str | None, **_preload: Any) -> None:
    """
    Inspect the locks of an app's tasks, and release stuck ones.

    The commands use the lock store directly; no worker has to answer. wake and tick need the
    broker, too.

    \b
    EXIT STATUS
      0   done; doctor: no problems
      1   nothing to do: the key is free, has no waiter or no limit, the task is
          not parked; or you declined; doctor: there are doubts
      2   usage error, or the store does not answer or does not support this;
          web, exporter: a package is missing, or the address is not available;
          doctor: locks cannot work
      3   limit, pause: done, but the key had no holder, waiter or limit (a typo?)
      4   tick --exit-code: done, and something waits
      141 the output was closed early, as by head in a pipe
    """  # noqa: D301  # click's marker for unwrapped lines
    from celery_distlock.runtime.app import Runtime

    _log_to_stderr(ctx)
    _escape_what_cannot_be_written()
    given = {"url": url, "prefix": prefix}
    flags = {name: value for name, value in given.items() if value is not None}
    if flags:
        Runtime.of(ctx.obj.app).use_flags(flags, named="--*")


def _log_to_stderr(ctx: click.Context) -> None:
    logger, handler = logging.getLogger("celery_distlock"), _LogToStderr(ctx.obj)
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)

    def restore() -> None:
        logger.removeHandler(handler)
        logger.propagate = propagates

    ctx.call_on_close(restore)


def _escape_what_cannot_be_written() -> None:
    """Escape characters that stdout cannot encode, as stderr does: a key may have any."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command that gets the :class:`~celery.bin.base.CLIContext` as first argument."""

    def declare(function: Callable[..., Any]) -> click.Command:
        return click.command(name, cls=CeleryCommand)(click.pass_obj(function))

    return declare
