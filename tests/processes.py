"""The processes of this machine, from /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator


class Process(NamedTuple):
    pid: int
    state: str  # one letter: R running, S sleeping, T stopped, ...
    parent: int
    session: int


def processes() -> Iterator[Process]:
    """All that are alive; a zombie is not."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):  # it ended while we looked
            # The name, in parentheses, may hold anything, even parentheses.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            process = Process(int(folder.name), fields[0], int(fields[1]), int(fields[3]))
            if process.state not in "ZX":
                yield process


def children(pid: int) -> list[int]:
    return sorted(process.pid for process in processes() if process.parent == pid)


def session(pid: int) -> list[Process]:
    """The processes of the session that *pid* leads or led, orphans included."""
    return [process for process in processes() if process.session == pid]


def alive(pid: int) -> bool:
    return any(process.pid == pid for process in processes())


def signal_session(pid: int, signum: signal.Signals) -> None:
    for process in session(pid):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signum)
