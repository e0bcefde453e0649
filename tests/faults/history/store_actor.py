"""
The actor of :mod:`tests.faults.history.actor`, over a store that is named by its class.

Run as ``python -m tests.faults.history.store_actor URL PREFIX FILE SEED MODULE:CLASS``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

from celery_distlock.testing import die_with_parent
from tests.faults.history import actor

ROOT = Path(__file__).parents[3]


def start(*arguments: str) -> subprocess.Popen[bytes]:
    """Start such a process; it ends when it reads a line."""
    return subprocess.Popen(
        die_with_parent([sys.executable, "-m", "tests.faults.history.store_actor", *arguments]),
        stdin=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
    )


def main(url: str, prefix: str, file: str, seed: str, name: str) -> None:
    module, _, cls = name.partition(":")
    store = getattr(import_module(f"celery_distlock.stores.{module}"), cls)
    actor.open_store = store  # type: ignore[attr-defined]
    actor.KEYS = 6
    actor.THREADS = 4
    actor.Actor(url, prefix, file, seed).run()


if __name__ == "__main__":
    main(*sys.argv[1:6])
