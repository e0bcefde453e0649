"""
A process that calls tasks through the store, and can be killed at any moment.

A call is a line on its standard input: the task's name, its arguments, its delay, and whether it is
the last one for its key.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from celery_distlock import clock
from celery_distlock.errors import StoreError
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

ENDING = 60.0  # seconds for the calls that it was ordered to make


class Caller:
    """Such a process, in the environment of this one."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "caller.log"
        self._process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", __name__]
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=ROOT, bufsize=0
            )

    def call(
        self, name: str, arguments: Sequence[object], countdown: float = 0.0, *, last: bool = False
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([name, arguments, countdown, last]).encode() + b"\n")

    def replace(self) -> None:
        """Kill the process, whatever it is at, and start another one."""
        self.close()
        self._process = self._start()

    def finish(self) -> bool:
        """Have it make all the calls that were ordered; return whether it has."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING)
        ended = self._process.poll() == 0
        self.close()
        return ended

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def main() -> None:
    from tests.chaos import app

    for line in sys.stdin:
        name, arguments, countdown, last = json.loads(line)
        task = app.app.tasks[f"{app.__name__}.{name}"]
        begin = clock.monotonic()
        try:
            result = task.apply_async(tuple(arguments), countdown=countdown or None)
        except StoreError:
            continue  # the caller knows that it was not accepted
        facts = {"begin": begin, "end": clock.monotonic(), "countdown": countdown, "last": last}
        lane = arguments[1] if name == "laned" else ""
        what = {"key": arguments[0], "argument": arguments[-1], "lane": lane}
        joined = bool(getattr(result, "joined", False))
        app.notes.write(call=result.id, task=name, joined=joined, **what, **facts)


if __name__ == "__main__":
    main()
