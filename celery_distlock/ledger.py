"""
What the processes of one worker hold, written where their parent can read it after their death.

A page of memory that a parent shares with the children it forks. A child notes what it is about to
ask for and what it has got, and strikes what it has given back: writes to memory, no system call.
When a child is gone, for whatever reason, its parent releases what it left; while a child is alive
and does not renew its leases, in C code that does not let go of the interpreter say, its parent
renews them. Between processes that do not share the page (spawned ones, other workers) neither is
done: there a lease ends.
"""

import fcntl
import json
import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from typing import NamedTuple

from . import clock
from .lease import Hold, HoldState, believed

__all__ = ["Ledger", "Neglect", "Remains"]

PAGES = 512  # children at once that have a page; any further one is freed by its lease
PAGE = 8192  # bytes
# Of each page: pid, which half counts, the lengths of both, a number that every write raises; when
# the child last renewed a lease (seconds); until when the parent did, and at which number.
_HEAD = struct.Struct("=iB3xHHIddI4x")
_LENGTHS, _NUMBER, _BEAT, _KEPT = 8, 12, 16, 24
_HALF = (PAGE - _HEAD.size) // 2

NEGLECTED = 0.5  # of a lease; a watchdog renews after a third, and again after each ninth


class Remains(NamedTuple):
    """What a process has asked for and not given back."""

    store: str  # its identity
    key: str
    owner: str
    lease: float = 0.0  # seconds, if it holds the key and is to renew it
    limit: float | None = None  # until when, by the local clock


class Neglect(NamedTuple):
    """What a living process holds and has not renewed for half a lease."""

    page: int
    number: int
    holds: list[Remains]


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
        self._number = 0
        self._noted: dict[str, Remains] = {}
        self._alive: dict[int, tuple[int, int, float]] = {}  # by page: pid, number, since when

    def note(self, hold: Hold) -> None:
        """Write down how *hold* stands: before its key is asked for, and when that has changed."""
        renewed = hold.state is HoldState.HELD and hold.renewable
        limit = hold.terms.max_hold and hold.held_since + hold.terms.max_hold
        with self._mutex:
            self._begin()
            hold.keeper = self if self._page is not None else None
            self._noted[hold.owner] = Remains(
                hold.store.identity,
                hold.key,
                hold.owner,
                hold.terms.lease if renewed else 0.0,
                limit if renewed else None,
            )
            self._write()

    def strike(self, owner: str) -> None:
        """Cross out what *owner* had, after it was given back."""
        with self._mutex:
            if self._page_of == os.getpid() and owner in self._noted:
                del self._noted[owner]
                self._write()

    def beat(self) -> None:
        if self._page is not None and self._page_of == os.getpid():
            struct.pack_into("=d", self._memory, self._page * PAGE + _BEAT, clock.monotonic())

    def kept_until(self) -> float:
        if self._page is None or self._page_of != os.getpid():
            return 0.0
        head = self._page * PAGE
        (number,) = struct.unpack_from("=I", self._memory, head + _NUMBER)
        until, at_number = struct.unpack_from("=dI", self._memory, head + _KEPT)
        return float(until) if at_number == number else 0.0

    def bury(self) -> Iterator[Remains]:
        """Yield what is left of each child that is gone, and clear its page; for the parent."""
        for page, pid in self._children():
            if _gone(pid):
                yield from _parsed(self._read(page))
                _HEAD.pack_into(self._memory, page * PAGE, *(0,) * 8)
                self._alive.pop(page, None)

    def neglected(self) -> Iterator[Neglect]:
        """Yield what each living child holds and does not renew; for the parent, who may do it."""
        now = clock.monotonic()
        for page, pid in self._children():
            number, beat = struct.unpack_from("=Id", self._memory, page * PAGE + _NUMBER)
            known = self._alive.get(page)
            if known is None or known[:2] != (pid, number):
                self._alive[page] = (pid, number, now)
                continue
            written = self._read(page)
            if struct.unpack_from("=I", self._memory, page * PAGE + _NUMBER) != (number,):
                continue  # it writes just now, so it is not stuck; this may be half of it
            holds = [noted for noted in _parsed(written) if noted.lease]
            patience = min((hold.lease for hold in holds), default=math.inf) * NEGLECTED
            if now < max(known[2], beat) + patience:
                continue
            if all(hold.limit is None or now < hold.limit for hold in holds):
                yield Neglect(page, number, holds)

    def keep(self, neglect: Neglect, asked_at: float) -> None:
        """Tell a child that all of *neglect* was renewed, as asked for at *asked_at*."""
        until = asked_at + believed(min(hold.lease for hold in neglect.holds))
        known = self._alive.get(neglect.page)
        if known is not None:
            self._alive[neglect.page] = (*known[:2], asked_at)
        struct.pack_into("=dI", self._memory, neglect.page * PAGE + _KEPT, until, neglect.number)

    def _children(self) -> Iterator[tuple[int, int]]:
        for page in range(PAGES):
            (pid,) = struct.unpack_from("=i", self._memory, page * PAGE)
            if pid and pid != os.getpid():
                yield page, pid

    def _read(self, page: int) -> bytes:
        _, half, *lengths = _HEAD.unpack_from(self._memory, page * PAGE)[:4]
        start = page * PAGE + _HEAD.size + half * _HALF
        return self._memory[start : start + lengths[half]]

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
                    _HEAD.pack_into(self._memory, page * PAGE, self._page_of, *(0,) * 7)
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
        struct.pack_into("=H", self._memory, head + _LENGTHS + 2 * half, len(text))
        self._memory[head + 4] = half
        self._number = (self._number + 1) % 2**32
        struct.pack_into("=I", self._memory, head + _NUMBER, self._number)

    def after_fork(self) -> None:
        """Make a mutex that no thread of the parent holds."""
        self._mutex = threading.Lock()


def _parsed(written: bytes) -> list[Remains]:
    return [Remains(*entry) for entry in json.loads(written or b"[]")]


def _gone(pid: int) -> bool:
    """Whether our child *pid* runs no more, without reaping it: that is its pool's to do."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return state is not None
