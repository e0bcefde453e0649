"""
A table in shared memory of what a worker's processes hold, which their parent reads.

The parent makes the table and shares it with the children that it forks. When a child is gone, for
any reason, the parent releases what it held. While a child is alive and does not renew its leases,
for example in C code that keeps the interpreter lock, the parent renews them. Processes that do not
share the table (spawned ones, other workers) rely on the ends of leases. The invariants:

- A page belongs to one child: the one whose pid is in its head. A child takes a free page with its
  first hold, under the file's lock; only the parent frees it, once that child is gone.
- Only the child writes a page, except `_Head.renewal`, which only the parent writes. Writes go to
  memory, without system calls.
- A child records a hold before it asks for the key, and erases it after the key was released: what
  it may hold is always on its page.
- A page has two halves. A child writes the one that is not current, and then a single byte makes it
  current: a child that is killed at any moment leaves either the old entries or the new ones.
- Each write has a new `version`. The parent refers to entries by their index at a version. A child
  accepts a renewal only for the version that its page has, and saves it before it makes another.
- What does not fit, a page or an entry, is left to its lease.
"""

import ctypes
import fcntl
import json
import math
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring_ascii as _quoted
from operator import itemgetter
from typing import Any, BinaryIO, NamedTuple, TypeAlias

from celery_distlock import clock
from celery_distlock.keys import key_of, slot_name

from .hold import NEW, Hold, believed

PAGES = 512  # children at once that have a page; those of any other child are freed by their leases
PAGE = 8192  # bytes
RENEWABLE = 64  # entries of a page that the parent renews: the bits of `_Renewal.entries`

STALLED = 0.5  # of a lease without a renewal; a watchdog renews after a third, and after each ninth
RETRY = 1 / 9  # of a lease, between the parent's attempts


class _Renewal(ctypes.Structure):
    """What the parent has renewed for a child; written and read as a whole."""

    _fields_ = (
        ("until", ctypes.c_double),  # by the local clock; 0: nothing
        ("version", ctypes.c_uint32),
        ("entries", ctypes.c_uint64),  # a bit for each, by its index at that version
    )


class _Head(ctypes.Structure):
    """The head of a page; all zeros in a free page."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("current", ctypes.c_uint8),  # the half that is valid
        ("lengths", ctypes.c_uint16 * 2),  # of the halves' entries, in bytes
        ("version", ctypes.c_uint32),
        ("heartbeat", ctypes.c_double),  # when the child last renewed a lease
        ("renewal", _Renewal),
    )

    def assign(self, pid: int) -> None:
        """Clear the page for the process *pid*, or free it (0)."""
        rest = ctypes.addressof(self) + _Head.current.offset
        ctypes.memset(rest, 0, ctypes.sizeof(self) - _Head.current.offset)
        self.pid = pid  # last: a page with a pid is always clear


_HEAD = ctypes.sizeof(_Head)
_HALF = (PAGE - _HEAD) // 2
_Entry: TypeAlias = tuple[float, float | None, str]  # a lease, its limit, and a hold as JSON


class OrphanedHold(NamedTuple):
    """A hold that a process has asked for and not released."""

    store: str  # its identity
    key: str
    owner: str
    lease: float = 0.0  # seconds, if it holds the key and renews it
    limit: float | None = None  # when renewal stops, by the local clock


class StalledHolds(NamedTuple):
    """What a living process holds and has not renewed for half a lease."""

    page: int
    version: int
    holds: dict[int, OrphanedHold]  # by their index on the page


class SharedHolds:
    """
    The table; see the module. Made by the parent before it forks.

    Raises:
        OSError: There is no room for it.
    """

    def __init__(self) -> None:
        self._file = _make_file(PAGES * PAGE)  # open as long as the table is: its lock is used
        self._memory = mmap.mmap(self._file.fileno(), PAGES * PAGE)
        self._heads = [_Head.from_buffer(self._memory, page * PAGE) for page in range(PAGES)]
        # Reentrant: a signal handler may take a lock while its thread has this; see `_publish`.
        self._mutex = threading.RLock()
        self._parent = os.getpid()
        self._page: int | None = None
        self._page_of = 0  # the process that `_page` belongs to
        self._version = 0
        self._publishing = self._changed = False
        self._entries: dict[str, _Entry] = {}  # by owner
        self._renewed: dict[str, float] = {}  # until when, by owner
        self._alive: dict[int, tuple[int, int, float]] = {}  # by page: pid, version, since when
        self._tried: dict[int, float] = {}  # by page: when the parent last renewed

    def record(self, hold: Hold, *, at_once: bool = False) -> None:
        """
        Record the state of *hold*: before its key is asked for, and after each change.

        With *at_once*, it is recorded as if it were already held, because the key is granted
        immediately or not at all. Then the entry usually need not change on the grant: to renew
        what an owner does not have does no harm.
        """
        terms, early = hold.terms, at_once and hold.state is NEW
        renewed = hold.renewable or (early and terms.watchdog and terms.max_hold is None)
        lease = terms.lease if renewed else 0.0
        limit = hold.held_since + terms.max_hold if renewed and terms.max_hold else None
        with self._mutex:
            self._take_page()
            hold.keeper = self if self._page is not None else None
            known = self._entries.get(hold.owner)
            if known is None or known[:2] != (lease, limit):
                self._change(hold.owner, (lease, limit, _encode(hold, lease, limit)))

    def erase(self, owner: str) -> None:
        """Remove the entry of *owner*, after it was released."""
        with self._mutex:
            if self._page_of == os.getpid() and owner in self._entries:
                self._change(owner, None)

    def heartbeat(self) -> None:
        """Note that this process renews its leases itself."""
        if self._page is not None and self._page_of == os.getpid():
            self._heads[self._page].heartbeat = clock.monotonic()

    def renewed_until(self, owner: str) -> float:
        """Return until when, by the local clock, the parent has renewed *owner*'s lease; or 0."""
        # Without the mutex: a signal handler may ask while this thread is in `record`.
        return max(self._renewed.get(owner, 0.0), self._parents_renewals().get(owner, 0.0))

    def _parents_renewals(self) -> dict[str, float]:
        """Return the parent's renewals of the entries as they are now: until when, by owner."""
        if self._page is None or self._page_of != os.getpid():
            return {}
        shared = self._heads[self._page].renewal
        if not shared.until:  # as in most processes: the parent has renewed nothing
            return {}
        renewal = _Renewal.from_buffer_copy(shared)
        if not renewal.until or renewal.version != self._version:
            return {}
        owners = enumerate(list(self._entries))
        return {owner: renewal.until for index, owner in owners if renewal.entries >> index & 1}

    def _change(self, owner: str, entry: "_Entry | None") -> None:
        """Write *entry* for *owner*; None: remove it."""
        seen = None
        # A signal handler may have written, and the parent renewed that.
        while seen != self._version:
            seen = self._version
            self._save_renewals()
        # No call in between: after one, a signal handler could write the new version's number with
        # the old entries.
        self._version = (self._version + 1) % 2**32
        if entry is None:
            del self._entries[owner]
            self._renewed.pop(owner, None)
        else:
            self._entries[owner] = entry
        self._publish()

    def _save_renewals(self) -> None:
        """Save the parent's renewals before entries are renumbered: they are by index."""
        for owner, until in self._parents_renewals().items():
            self._renewed[owner] = max(until, self._renewed.get(owner, 0.0))

    def recorded(self) -> list[OrphanedHold]:
        """Return what the living children hold or ask for; for the parent."""
        return [entry for page, _ in self._children() for entry in _decode(self._read(page))]

    def reap(self) -> Iterator[OrphanedHold]:
        """Yield what each dead child has left, and free its page; for the parent."""
        for page, pid in self._children():
            if _is_gone(pid):
                yield from _decode(self._read(page))
                self._heads[page].assign(0)
                self._alive.pop(page, None)
                self._tried.pop(page, None)

    def stalled(self) -> Iterator[StalledHolds]:
        """Yield what each living child holds and does not renew, for the parent to renew."""
        now = clock.monotonic()
        for page, pid in self._children():
            head = self._heads[page]
            version, heartbeat = head.version, head.heartbeat
            known = self._alive.get(page)
            if known is None or known[:2] != (pid, version):
                self._alive[page] = (pid, version, now)
                continue
            written = self._read(page)
            if head.version != version:
                continue  # it writes just now, so it is not stuck; this may be half of it
            holds = {
                index: entry
                for index, entry in enumerate(_decode(written)[:RENEWABLE])
                if entry.lease and (entry.limit is None or now < entry.limit)
            }
            shortest = min((hold.lease for hold in holds.values()), default=math.inf)
            due = max(known[2], heartbeat) + shortest * STALLED
            if now >= max(due, self._tried.get(page, 0.0) + shortest * RETRY):
                self._tried[page] = now
                yield StalledHolds(page, version, holds)

    def extend(self, stalled: StalledHolds, indexes: Sequence[int], asked_at: float) -> None:
        """Mark which of the *stalled* holds were renewed, by a request made at *asked_at*."""
        until = asked_at + believed(min(stalled.holds[index].lease for index in indexes))
        known = self._alive.get(stalled.page)
        if known is not None:
            self._alive[stalled.page] = (*known[:2], asked_at)
        head = self._heads[stalled.page]
        head.renewal = _Renewal()  # first: never half of one renewal and half of another
        entries = sum(1 << index for index in indexes)
        head.renewal = _Renewal(until, stalled.version, entries)

    def close(self) -> None:
        """Free the memory; only where no child needs the table any longer."""
        self._heads.clear()
        self._memory.close()
        self._file.close()

    def _children(self) -> Iterator[tuple[int, int]]:
        for page, head in enumerate(self._heads):
            pid = head.pid
            if pid and pid != os.getpid():
                yield page, pid

    def _read(self, page: int) -> bytes:
        head = self._heads[page]
        half = head.current
        start = _start_of(page, half)
        return self._memory[start : start + head.lengths[half]]

    def _take_page(self) -> None:
        """Take a page, if this process has none; a parent's entries are not its child's."""
        pid = os.getpid()
        if self._page_of == pid:
            return
        # All at once: what a signal handler records from now on must not be cleared.
        self._entries, self._renewed, self._page, self._page_of = {}, {}, None, pid
        if os.getppid() != self._parent:
            return  # the parent itself, or a child's child, for which no process here waits
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            for page, head in enumerate(self._heads):
                if not head.pid:
                    head.assign(self._page_of)
                    self._page = page
                    return
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _publish(self) -> None:
        """Write the entries, and write again what a signal handler changes during that."""
        self._changed = True
        while self._changed and not self._publishing:
            try:
                self._publishing = True
                self._changed = False
                self._write()
            finally:
                self._publishing = False

    def _write(self) -> None:
        if self._page is None:
            return
        head = self._heads[self._page]
        half = 1 - head.current
        version = self._version  # before the entries: these may be newer, but not older
        entries = map(itemgetter(2), list(self._entries.values()))  # a handler may change them
        text = ",".join(entries).encode()
        if len(text) > _HALF:
            text = b""  # too much for a page: these are freed by their leases
        start = _start_of(self._page, half)
        self._memory[start : start + len(text)] = text
        head.lengths[half] = len(text)
        head.current = half
        head.version = version

    def after_fork(self) -> None:
        """Replace the mutex, which a thread of the parent may hold."""
        self._mutex = threading.RLock()
        self._publishing = False


def _start_of(page: int, half: int) -> int:
    return page * PAGE + _HEAD + half * _HALF


def _make_file(size: int) -> BinaryIO:
    """
    Return a file of zeros with all of its space allocated.

    A write to a mapped page that has no space, on a full disk, kills the process that writes.
    """
    file: Any
    if hasattr(os, "memfd_create"):  # not on a disk, which may be full or slow
        file, allocate = os.fdopen(os.memfd_create("distlock"), "r+b"), os.ftruncate
    else:
        file, allocate = tempfile.TemporaryFile(), _fill  # noqa: SIM115  # the caller closes it
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


def _encode(hold: Hold, lease: float, limit: float | None) -> str:
    """Return the JSON of an `OrphanedHold`, with the name of its key, which is short."""
    texts = ",".join(map(_quoted, (hold.store.identity, slot_name(hold.key), hold.owner)))
    return f"[{texts},{lease},{'null' if limit is None else limit}]"


def _decode(written: bytes) -> list[OrphanedHold]:
    entries = json.loads(b"[%b]" % written)
    return [OrphanedHold(store, key_of(name), *others) for store, name, *others in entries]


def _is_gone(pid: int) -> bool:
    """Whether our child *pid* has ended, without reaping it: its pool does that."""
    try:
        state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return state is not None
