"""The examples, run as a reader runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.processes import processes

if TYPE_CHECKING:
    from collections.abc import Mapping

EXAMPLES = Path(__file__).parents[3] / "examples"
TIMEOUT = 100.0  # seconds


def start(
    folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start Python on *arguments*; all temporary files go to *folder*: what it leaves shows."""
    environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "100", **(env or {})}
    environment["PYTHONIOENCODING"] = "utf-8"
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )


def run(
    folder: Path, *arguments: str | Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run Python on *arguments* to the end, as `start` does."""
    with start(folder, *arguments, env=env) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT)
        except BaseException:
            process.terminate()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def left_running(folder: Path) -> list[int]:
    """The pids of the processes whose temporary files go to *folder* or below it."""
    mark = f"TMPDIR={folder}".encode()
    return [process.pid for process in processes() if mark in environment_of(process.pid)]


def environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it ended while we looked, or is not ours
        return b""
