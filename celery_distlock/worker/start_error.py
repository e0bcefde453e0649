"""Wrong settings, as commands of Celery's tell them, which show a traceback of most errors."""

from collections.abc import Iterator
from contextlib import contextmanager

import click
from celery.bin.base import CLIContext

from celery_distlock.errors import ConfigurationError

__all__ = ["StartError", "told_by_commands"]


class StartError(ConfigurationError, click.ClickException):
    """As an option's error, a command says it in one line, and ends."""


@contextmanager
def told_by_commands() -> Iterator[None]:
    """Let the command of Celery's that this thread runs, if any, say what is wrong in one line."""
    try:
        yield
    except ConfigurationError as error:
        context = click.get_current_context(silent=True)
        if context is None or not isinstance(context.find_root().obj, CLIContext):
            raise
        raise StartError(str(error)) from error
