"""
What the processes of one worker hold, written where their parent can read it after their death.

A page of memory that a parent shares with the children it forks. A child notes what it is about to
ask for, and strikes it when it has given it back: two writes to memory, no system call. When a
child is gone, for whatever reason, its parent releases what it left. Between processes that do not
share it (spawned ones, other workers) nothing is lost but time: there the lease ends.
"""

import fcntl
import json
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple

from .lease import Hold

__all__ = ["Ledger", "Remains"]

PAGES = 512  # children at once that have a page; any further one is freed by its lease
PAGE = 8192  # bytes
_HEAD = struct.Struct("=iB3xHH")  # pid, which half counts, the lengths of both
_HALF = (PAGE - _HEAD.size) // 2


class Remains(NamedTuple):
    """What a process that is gone had asked for and not given back."""

    store: str  # its identity
    key: str
    owner: str


class Ledger:
    """
    See the module. Made by the parent before it forks; each process then writes its own page.

    A write goes to the half that does not count, then one byte makes it count, so that a process
    killed in the middle of it leaves what it had written before.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # open for as long as the ledger is
        self._file.truncate(PAGES * PAGE)
        self._memory = mmap.mmap(self._file.fileno(), PAGES * PAGE)
        self._mutex = threading.Lock()
        self._parent = os.getpid()
        self._page: int | None = None
        self._page_of = 0  # the process that `_page` belongs to
        self._noted: dict[str, Remains] = {}

    def note(self, hold: Hold) -> None:
        """Write down *hold*, before its key is asked for."""
        with self._mutex:
            self._begin()
            self._noted[hold.owner] = Remains(hold.store.identity, hold.key, hold.owner)
            self._write()

    def strike(self, owner: str) -> None:
        """Cross out what *owner* had, after it was given back."""
        with self._mutex:
            if self._page_of == os.getpid() and owner in self._noted:
                del self._noted[owner]
                self._write()

    def bury(self) -> Iterator[Remains]:
        """Yield what is left of each child that is gone, and clear its page; for the parent."""
        for page in range(PAGES):
            pid, half, *lengths = _HEAD.unpack_from(self._memory, page * PAGE)
            if not pid or pid == os.getpid() or not _gone(pid):
                continue
            start = page * PAGE + _HEAD.size + half * _HALF
            written = self._memory[start : start + lengths[half]]
            yield from (Remains(*entry) for entry in json.loads(written or b"[]"))
            _HEAD.pack_into(self._memory, page * PAGE, 0, 0, 0, 0)

    def _begin(self) -> None:
        """Take a page, if this process has none; what a parent has noted is not its child's."""
        if self._page_of == os.getpid():
            return
        self._page_of = os.getpid()
        self._noted = {}
        self._page = None
        if os.getppid() != self._parent:
            return  # the parent itself, or a process of a child's, which nobody here waits for
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            for page in range(PAGES):
                if not _HEAD.unpack_from(self._memory, page * PAGE)[0]:
                    _HEAD.pack_into(self._memory, page * PAGE, self._page_of, 0, 0, 0)
                    self._page = page
                    return
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _write(self) -> None:
        if self._page is None:
            return
        head = self._page * PAGE
        half = 1 - self._memory[head + 4]
        text = json.dumps(list(self._noted.values())).encode() if self._noted else b""
        if len(text) > _HALF:
            text = b""  # too much for a page: these are freed by their leases
        start = head + _HEAD.size + half * _HALF
        self._memory[start : start + len(text)] = text
        struct.pack_into("=H", self._memory, head + 8 + 2 * half, len(text))
        self._memory[head + 4] = half

    def after_fork(self) -> None:
        """Make a mutex that no thread of the parent holds."""
        self._mutex = threading.Lock()


def _gone(pid: int) -> bool:
    """Whether our child *pid* runs no more, without reaping it: that is its pool's to do."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return state is not None
