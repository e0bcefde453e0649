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
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from celery_distlock import clock
from celery_distlock.keys import key_of, slot_name

from .lease import Hold, HoldState, believed

__all__ = ["OrphanedHold", "SharedHolds", "StalledHold"]

PAGES = 512  # children at once that have a page; any further one is freed by its lease
PAGE = 8192  # bytes
# Of each page: pid, which half counts, the lengths of both, a number that every write raises; when
# the child last renewed a lease (seconds); until when the parent did, at which number, and which of
# the first 64 that were noted then (bits).
_HEAD = struct.Struct("=iB3xHHIddI4xQ")
_KEEPING = struct.Struct("=dI4xQ")
_LENGTHS, _NUMBER, _BEAT, _KEPT = 8, 12, 16, 24
_HALF = (PAGE - _HEAD.size) // 2

NEGLECTED = 0.5  # of a lease; a watchdog renews after a third, and again after each ninth
AGAIN = 1 / 9  # of a lease, between attempts of the parent's


class OrphanedHold(NamedTuple):
    """What a process has asked for and not given back."""

    store: str  # its identity
    key: str
    owner: str
    lease: float = 0.0  # seconds, if it holds the key and is to renew it
    limit: float | None = None  # until when, by the local clock


class StalledHold(NamedTuple):
    """What a living process holds and has not renewed for half a lease."""

    page: int
    number: int
    holds: dict[int, OrphanedHold]  # by their place on the page


class SharedHolds:
    """
    See the module. Made by the parent before it forks; each process then writes its own page.

    A write goes to the half that does not count, then one byte makes it count, so that a process
    killed in the middle of it leaves what it had written before.

    Raises:
        OSError: There is no room for it.
    """

    def __init__(self) -> None:
        self._file = _make_file(PAGES * PAGE)  # open for as long as the ledger is: its lock counts
        self._memory = mmap.mmap(self._file.fileno(), PAGES * PAGE)
        self._mutex = threading.Lock()
        self._parent = os.getpid()
        self._page: int | None = None
        self._page_of = 0  # the process that `_page` belongs to
        self._number = 0
        self._noted: dict[str, OrphanedHold] = {}
        self._kept: dict[str, float] = {}  # by owner
        self._alive: dict[int, tuple[int, int, float]] = {}  # by page: pid, number, since when
        self._tried: dict[int, float] = {}  # by page: when the parent last renewed

    def note(self, hold: Hold) -> None:
        """Write down how *hold* stands: before its key is asked for, and when that has changed."""
        renewed = hold.state is HoldState.HELD and hold.renewable
        limit = hold.terms.max_hold and hold.held_since + hold.terms.max_hold
        with self._mutex:
            self._begin()
            hold.keeper = self if self._page is not None else None
            self._turn_over()
            self._noted[hold.owner] = OrphanedHold(
                hold.store.identity,
                slot_name(hold.key),  # which is short
                hold.owner,
                hold.terms.lease if renewed else 0.0,
                limit if renewed else None,
            )
            self._write()

    def strike(self, owner: str) -> None:
        """Cross out what *owner* had, after it was given back."""
        with self._mutex:
            if self._page_of == os.getpid() and owner in self._noted:
                self._turn_over()
                del self._noted[owner]
                self._kept.pop(owner, None)
                self._write()

    def beat(self) -> None:
        if self._page is not None and self._page_of == os.getpid():
            struct.pack_into("=d", self._memory, self._page * PAGE + _BEAT, clock.monotonic())

    def kept_until(self, owner: str) -> float:
        # Without the mutex: a signal's handler may ask while this thread is in `note`.
        return max(self._kept.get(owner, 0.0), self._told().get(owner, 0.0))

    def _told(self) -> dict[str, float]:
        """Return what the parent has renewed of what is on the page now, and until when."""
        if self._page is None or self._page_of != os.getpid():
            return {}
        kept = _KEEPING.unpack_from(self._memory, self._page * PAGE + _KEPT)
        until, at_number, places = kept
        if not until or at_number != self._number:
            return {}
        return {o: until for place, o in enumerate(list(self._noted)) if places >> place & 1}

    def _turn_over(self) -> None:
        """Keep what the parent has told: it tells by places on the page, and they change now."""
        told = self._told()
        self._number = (self._number + 1) % 2**32
        for owner, until in told.items():
            self._kept[owner] = max(until, self._kept.get(owner, 0.0))

    def noted(self) -> list[OrphanedHold]:
        """Return what the living children hold or ask for; for the parent."""
        return [entry for page, _ in self._children() for entry in _parsed(self._read(page))]

    def bury(self) -> Iterator[OrphanedHold]:
        """Yield what is left of each child that is gone, and clear its page; for the parent."""
        for page, pid in self._children():
            if _gone(pid):
                yield from _parsed(self._read(page))
                _HEAD.pack_into(self._memory, page * PAGE, *(0,) * 9)
                self._alive.pop(page, None)
                self._tried.pop(page, None)

    def neglected(self) -> Iterator[StalledHold]:
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
            holds = {
                place: noted
                for place, noted in enumerate(_parsed(written)[:64])
                if noted.lease and (noted.limit is None or now < noted.limit)
            }
            shortest = min((hold.lease for hold in holds.values()), default=math.inf)
            renewed = max(known[2], beat) + shortest * NEGLECTED
            if now >= max(renewed, self._tried.get(page, 0.0) + shortest * AGAIN):
                self._tried[page] = now
                yield StalledHold(page, number, holds)

    def keep(self, neglect: StalledHold, places: Sequence[int], asked_at: float) -> None:
        """Tell a child which *places* of *neglect* were renewed, as asked for at *asked_at*."""
        until = asked_at + believed(min(neglect.holds[place].lease for place in places))
        known = self._alive.get(neglect.page)
        if known is not None:
            self._alive[neglect.page] = (*known[:2], asked_at)
        start = neglect.page * PAGE + _KEPT
        _KEEPING.pack_into(self._memory, start, 0.0, 0, 0)  # never half of the one and the other
        _KEEPING.pack_into(
            self._memory, start, until, neglect.number, sum(1 << place for place in places)
        )

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
        self._kept = {}
        self._page = None
        if os.getppid() != self._parent:
            return  # the parent itself, or a process of a child's, which nobody here waits for
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            for page in range(PAGES):
                if not _HEAD.unpack_from(self._memory, page * PAGE)[0]:
                    _HEAD.pack_into(self._memory, page * PAGE, self._page_of, *(0,) * 8)
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
        struct.pack_into("=I", self._memory, head + _NUMBER, self._number)

    def after_fork(self) -> None:
        """Make a mutex that no thread of the parent holds."""
        self._mutex = threading.Lock()


def _make_file(size: int) -> BinaryIO:
    """
    Return a file of zeros that has all of its room already.

    A write to a mapped file that has none, on a disk that is full by then, kills who writes.
    """
    file: Any
    if hasattr(os, "memfd_create"):  # no disk under it, that may be full or slow
        file, allocate = os.fdopen(os.memfd_create("distlock"), "r+b"), os.ftruncate
    else:
        file, allocate = tempfile.TemporaryFile(), _fill  # noqa: SIM115  # for who asks to close
    try:
        allocate(file.fileno(), size)
    except BaseException:
        file.close()
        raise
    return file  # type: ignore[no-any-return]


def _fill(number: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(number, 0, size)
    else:
        os.pwrite(number, bytes(size), 0)


def _parsed(written: bytes) -> list[OrphanedHold]:
    entries = json.loads(written or b"[]")
    return [OrphanedHold(store, key_of(name), *others) for store, name, *others in entries]


def _gone(pid: int) -> bool:
    """Whether our child *pid* runs no more, without reaping it: that is its pool's to do."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return state is not None
