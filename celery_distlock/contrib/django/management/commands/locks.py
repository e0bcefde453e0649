"""``manage.py locks``: ``celery locks`` for the project's Celery app."""

import argparse
import sys
from typing import Any

from celery.bin.base import CLIContext
from django.core.management.base import BaseCommand, handle_default_options

from celery_distlock.contrib.django import celery_app
from celery_distlock.errors import ConfigurationError
from celery_distlock.ops.cli import locks


class Command(BaseCommand):
    """Runs the commands of ``celery locks``, with their own options and exit statuses."""

    def run_from_argv(self, argv: list[str]) -> None:
        """Run a command line; Django's own options are ``--settings`` and ``--pythonpath``."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--settings")
        parser.add_argument("--pythonpath")
        options, args = parser.parse_known_args(argv[2:])
        handle_default_options(options)
        self.handle(*args)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Take the arguments of `call_command`."""
        parser.add_argument("args", nargs=argparse.REMAINDER)

    def handle(self, *args: str, **_: Any) -> None:
        """Run one command; raise `SystemExit` with its status."""
        try:
            context = CLIContext(celery_app(), no_color=False, workdir=None)
        except ConfigurationError as error:
            self.stderr.write(f"Error: {error}")
            sys.exit(2)
        locks.main(list(args), prog_name="manage.py locks", obj=context)
