"""
Who held which key, as far as the looks of the page's server have shown.

Nobody writes it down: locks cost the same whether somebody watches or not. So it has what was there
at a look, while somebody watched, and it ends with the server.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_distlock.ops.admin import Holder, LockInfo

__all__ = ["Grant", "History", "KeyHistory"]

MOST_KEYS = 10_000  # that are remembered; about 20 MB
MOST_GRANTS = 8  # of a key


@dataclass(slots=True)
class Grant:
    """
    One that had a key. All times are seconds since the epoch.

    Attributes:
        holder: Who.
        token: The grant's fencing token.
        since: When it was granted, or when it was seen first if the record tells no time.
        seen: When it was seen last.
        ended: When it was found to have ended, at most so late; 0: it has it.
    """

    holder: Holder
    token: int
    since: float
    seen: float
    ended: float = 0.0


@dataclass(slots=True)
class KeyHistory:
    """
    What was seen of one key.

    Attributes:
        grants: The last ones, the newest first.
        most_waiting: How many waited at once, at most.
        longest_wait: Seconds for which the first in the queue had waited, at most.
    """

    grants: list[Grant] = field(default_factory=list)
    most_waiting: int = 0
    longest_wait: float = 0.0


class History:
    """See the module. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, KeyHistory] = OrderedDict()  # the last changed last
        self._held: set[str] = set()
        self._mutex = threading.Lock()
        self.since = 0.0  # the first look, in seconds since the epoch

    def note_all(self, locks: Iterable[LockInfo], at: float, *, whole: bool) -> None:
        """Note a look at *locks* at the time *at*; *whole*: there are no others."""
        with self._mutex:
            self.since = self.since or at
            found = set()
            for lock in locks:
                found.add(lock.key)
                self._note(lock, at)
            for key in self._held - found if whole else ():
                self._end(key, at)

    def note(self, lock: LockInfo, at: float) -> None:
        """Note a look at one key, which may be free."""
        with self._mutex:
            self.since = self.since or at
            self._note(lock, at)

    def of(self, key: str) -> KeyHistory:
        """Return a copy of what is remembered of *key*."""
        with self._mutex:
            known = self._keys.get(key, KeyHistory())
            return KeyHistory(list(known.grants), known.most_waiting, known.longest_wait)

    def _note(self, lock: LockInfo, at: float) -> None:
        known = self._keys.get(lock.key)
        last = known.grants[0] if known and known.grants else None
        held = lock.state == "held" and lock.holder is not None
        if held and last and lock.token < last.token:
            return  # a look that began before another one, and ended after it
        if last and not last.ended and (not held or last.token != lock.token):
            self._end(lock.key, min(at, lock.since) if held and lock.since else at)
        if not held and not lock.waiting and known is None:
            return
        if known is None:
            known = self._keys[lock.key] = KeyHistory()
            if len(self._keys) > MOST_KEYS:
                self._held.discard(self._keys.popitem(last=False)[0])
        if held and lock.holder is not None:
            if last is None or last.token != lock.token:
                known.grants[:0] = [Grant(lock.holder, lock.token, lock.since or at, at)]
                del known.grants[MOST_GRANTS:]
                self._keys.move_to_end(lock.key)
                self._held.add(lock.key)
            else:
                last.seen, last.ended = at, 0.0
                self._held.add(lock.key)
        known.most_waiting = max(known.most_waiting, lock.waiting)
        if lock.oldest:
            known.longest_wait = max(known.longest_wait, at - lock.oldest)

    def _end(self, key: str, at: float) -> None:
        self._held.discard(key)
        known = self._keys.get(key)
        if known and known.grants and not known.grants[0].ended:
            grant = known.grants[0]
            grant.ended = max(at, grant.seen)
