"""``python -m tests.integration.web.serve APP …``: as the group ``celery locks`` runs it."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import click

from celery_distlock.ops.web.command import web

if __name__ == "__main__":
    app = importlib.import_module(sys.argv[1]).app
    group = click.Group("locks", commands=[web])
    group.main(["web", *sys.argv[2:]], obj=SimpleNamespace(app=app), prog_name="locks")
