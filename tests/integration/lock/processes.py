"""Other processes that use locks: small scripts that report by lines of JSON."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from celery_distlock.testing import die_with_parent

if TYPE_CHECKING:
    from types import TracebackType

ROOT = Path(__file__).parents[3]

PRELUDE = """
import json, os, signal, sys, threading, time
from celery_distlock.errors import *
from celery_distlock.lock import Lock
from celery_distlock.stores import open_store

signal.signal(signal.SIGINT, signal.default_int_handler)  # not so in a background job's children
store = open_store(*sys.argv[1:3])

def report(**facts):
    print(json.dumps(facts), flush=True)

def ask():
    return sys.stdin.readline().strip()
"""


def run_program(source: str, *arguments: str) -> None:
    """Run a Python program of its own to its end; fail, with what it said, if it did."""
    program = subprocess.run(
        [sys.executable, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert program.returncode == 0, program.stderr


class Script:
    """
    A Python process that runs *source* after `PRELUDE`.

    It has ``store``, ``Lock`` and the errors, ``report(**facts)`` to report and ``ask()`` to wait
    for a line; *arguments* are in ``sys.argv[3:]``. It is killed when its block is left.
    """

    def __init__(self, source: str, url: str, prefix: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            die_with_parent([sys.executable, "-c", PRELUDE + source, url, prefix, *arguments]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def received(self, timeout: float = 60.0) -> dict[str, Any]:
        """The next thing that it reports."""
        line = self._lines.get(timeout=timeout)
        assert line, "the script ended"
        facts: dict[str, Any] = json.loads(line)
        return facts

    def say(self, line: str = "go") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def signal(self, signum: signal.Signals) -> None:
        self._process.send_signal(signum)

    def pause(self) -> None:
        """Freeze it; return once it is stopped."""
        self.signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)

    def ended(self, timeout: float = 60.0) -> int:
        """Wait for its end; return its exit status."""
        return self._process.wait(timeout)
