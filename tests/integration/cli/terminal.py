"""A command in a terminal: a pty that a test types into and reads from."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import termios
from typing import TYPE_CHECKING

from celery_distlock.testing import die_with_parent
from tests.waiting import wait_until
from tests.workers import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    """See the module."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], columns: int) -> None:
        self._screen, inside = pty.openpty()
        termios.tcsetwinsize(inside, (40, columns))
        self.process = subprocess.Popen(
            die_with_parent(command, signal.SIGTERM),
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=ROOT,
            env=env,
            start_new_session=True,
        )
        os.close(inside)
        self.raw = b""

    @property
    def text(self) -> str:
        """All that was written so far, without colours and movements."""
        return CONTROL.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def read(self) -> str:
        """Take what there is to read; return `text`."""
        while select.select([self._screen], [], [], 0)[0]:
            try:
                more = os.read(self._screen, 65536)
            except OSError:  # its other end is closed
                break
            if not more:
                break
            self.raw += more
        return self.text

    def wait(self, text: str) -> None:
        wait_until(lambda: text in self.read(), timeout=60, what=f"{text!r} on the screen")

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def status(self) -> int:
        """Wait for the end; return the exit status."""

        def ended() -> bool:
            self.read()
            return self.process.poll() is not None

        wait_until(ended, timeout=60, what="the end of the command")
        self.read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._screen)
