"""The command as users run it, over a site of its own: see tests/worker/conftest.py."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol

import pytest
from celery.bin.base import CLIContext
from click.testing import CliRunner, Result

from celery_distlock.ops.cli import locks as group
from tests.integration.cli.terminal import Terminal
from tests.worker.conftest import _show_logs, bare_site, crew, key, site
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.worker.conftest import Site

__all__ = ["_show_logs", "bare_site", "crew", "key", "site"]


# click 8.1 mixes the two outputs unless that is turned off; later ones never do, without an option.
APART = "mix_stderr" in inspect.signature(CliRunner).parameters
SEPARATE: dict[str, Any] = {"mix_stderr": False} if APART else {}


class RunLocks(Protocol):
    """The `locks` fixture: ``celery -A <the site's app> locks ...``, without a terminal."""

    def __call__(
        self, *arguments: str, options: tuple[str, ...] = ()
    ) -> subprocess.CompletedProcess[str]: ...


def command(site: Site, *arguments: str, options: tuple[str, ...] = ()) -> list[str]:
    app = site.tasks.__name__
    return [sys.executable, "-m", "celery", *options, "-A", app, "locks", *arguments]


def environment(site: Site) -> dict[str, str]:
    unwanted = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"}
    inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**inherited, **site.env, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


@pytest.fixture
def locks(bare_site: Site) -> RunLocks:
    def run(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(bare_site, *arguments, options=options),
            env=environment(bare_site),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,  # a list of 100,000 keys, on a busy machine
            check=False,
        )

    return run


@pytest.fixture
def terminal(bare_site: Site) -> Iterator[Callable[..., Terminal]]:
    """The same in a terminal; takes ``columns`` and ``options``, too."""
    started: list[Terminal] = []

    def start(*arguments: str, options: tuple[str, ...] = (), columns: int = 200) -> Terminal:
        words = command(bare_site, *arguments, options=options)
        terminal = Terminal(words, env=environment(bare_site), columns=columns)
        started.append(terminal)
        return terminal

    yield start
    for terminal in started:
        terminal.close()


@pytest.fixture
def invoke(bare_site: Site) -> Callable[..., Result]:
    """The command in this process, where only what it writes matters."""

    def run(*arguments: str, no_color: bool = True) -> Result:
        obj = CLIContext(app=bare_site.app, no_color=no_color, workdir=None)
        return CliRunner(**SEPARATE).invoke(group, arguments, obj=obj)

    return run
