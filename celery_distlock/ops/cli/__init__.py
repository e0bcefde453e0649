"""``celery locks``: commands for operators, to see locks and to free what is stuck."""

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

# Every `celery` command imports this module, so the rest is imported when it is asked for.
_COMMANDS = {
    "list": ".listing:list_",
    "show": ".single:show_",
    "queue": ".single:queue_",
    "release": ".single:release_",
    "wake": ".single:wake_",
    "drop": ".single:drop_",
    "limit": ".limits:limit_",
    "pause": ".limits:pause_",
    "resume": ".limits:resume_",
    "top": ".top:top_",
    "doctor": ".doctor:doctor_",
    "exporter": ".exporter:exporter",
    "web": "..web.command:web",
}


CUT_OFF = 141  # as a shell says of who is ended by SIGPIPE


class CommandError(click.ClickException):
    """Ends a command with one line and status 2: the store cannot do what is asked for."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        """Write the line to stderr."""
        from .display import printable

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
            # Python writes what is left of it once more at the end, and complains.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(CUT_OFF)  # click itself says 1, which here means that something is not there


def _names_an_app(ctx: click.Context) -> bool:
    return bool(ctx.find_root().params.get("app"))


class _LogToStderr(logging.Handler):
    """Shows what the package logs as one line each, on stderr."""

    def __init__(self, obj: CLIContext) -> None:
        super().__init__(logging.WARNING)
        self._obj = obj

    def emit(self, record: logging.LogRecord) -> None:
        from .display import printable

        cause = f": {record.exc_info[1]}" if record.exc_info and record.exc_info[1] else ""
        self._obj.error(printable(f"{record.levelname.lower()}: {record.getMessage()}{cause}"))


@click.group(cls=_Locks, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--url",
    help="The lock store's URL, instead of the app's distlock_url; without a password, as whoever"
    " lists this machine's processes sees it.",
)
@click.option("--prefix", help="What the names of all lock records begin with, likewise.")
@click.pass_context
@handle_preload_options
def locks(ctx: click.Context, url: str | None, prefix: str | None, **_preload: Any) -> None:
    """
    See the locks of an app's tasks, and free what is stuck.

    Everything is asked of the lock store; no worker and no broker has to answer.

    \b
    EXIT STATUS
      0   done; doctor: all is fine
      1   nothing to do: the key is free, has no waiter or no limit, the task is
          not parked; or you said no; doctor: there are doubts
      2   the command is wrong, or the store cannot be reached, or cannot do it;
          web, exporter: no package, or no address to listen at;
          doctor: there can be no locks
      3   limit, pause: done, at a key without holder, waiter or limit (a typo?)
      141 the reader of the output ended first, as head does in a pipe
    """  # noqa: D301  # click's mark for lines that are kept
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
    """Have stdout escape what its encoding lacks, as stderr does: a key may have any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def command(name: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Declare a command that is given the :class:`~celery.bin.base.CLIContext` first."""

    def declare(function: Callable[..., Any]) -> click.Command:
        return click.command(name, cls=CeleryCommand)(click.pass_obj(function))

    return declare
