"""
Who held which key, as far as the looks of the page's server have shown.

Nobody writes it down: locks cost the same whether somebody watches or not. So it has what was there
at a look, while somebody watched, and it ends with the server.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_distlock.ops.admin import Holder, HoldInfo
from celery_distlock.stores.values import KeyState

__all__ = ["Grant", "History", "KeyHistory"]

MOST_KEYS = 10_000  # that are remembered; about 20 MB
MOST_GRANTS = 8  # of a key, unless more have it now


@dataclass(slots=True)
class Grant:
    """
    One that had a key. All times are seconds since the epoch.

    Attributes:
        holder: Who.
        token: The grant's fencing token; of those who share a key, the same for all.
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

    def note_all(self, locks: Iterable[KeyState], at: float, *, whole: bool) -> None:
        """Note a look at *locks* at the time *at*; *whole*: there are no others."""
        with self._mutex:
            self.since = self.since or at
            found = set()
            for lock in locks:
                found.add(lock.key)
                self._note(lock, at)
            for key in self._held - found if whole else ():
                self._end(key, at)

    def note(self, lock: KeyState, at: float) -> None:
        """Note a look at one key, which may be free."""
        with self._mutex:
            self.since = self.since or at
            self._note(lock, at)

    def of(self, key: str) -> KeyHistory:
        """Return a copy of what is remembered of *key*."""
        with self._mutex:
            known = self._keys.get(key, KeyHistory())
            return KeyHistory(list(known.grants), known.most_waiting, known.longest_wait)

    def _note(self, lock: KeyState, at: float) -> None:
        held = [hold for hold in lock.holds if hold.state == "held"]
        known = self._keys.get(lock.key)
        if held and known and lock.token < max((each.token for each in known.grants), default=0):
            return  # a look that began before another one, and ended after it
        if known is None:
            if not held and not lock.waiting:
                return
            known = self._keys[lock.key] = KeyHistory()
            if len(self._keys) > MOST_KEYS:
                self._held.discard(self._keys.popitem(last=False)[0])
        self._end_others(lock, known, held, at)
        for hold in sorted(held, key=lambda hold: hold.since):
            self._note_hold(lock, known, hold, at)
        ended = [each for each in known.grants if each.ended]
        for each in ended[max(0, MOST_GRANTS - len(known.grants) + len(ended)) :]:
            known.grants.remove(each)
        (self._held.add if held else self._held.discard)(lock.key)
        known.most_waiting = max(known.most_waiting, lock.waiting)
        if lock.oldest:
            known.longest_wait = max(known.longest_wait, at - lock.oldest)

    def _end_others(
        self, lock: KeyState, known: KeyHistory, held: list[HoldInfo], at: float
    ) -> None:
        """Note the end of who has *lock* no more: now, or when it went to others."""
        now = {_identity(lock, hold) for hold in held}
        first = min((hold.since for hold in held if hold.since), default=at)
        for grant in known.grants:
            if not grant.ended and (grant.token, grant.holder.owner) not in now:
                passed_on = grant.token != lock.token  # not so, where others have it beside
                grant.ended = max(min(at, first) if passed_on else at, grant.seen)

    def _note_hold(self, lock: KeyState, known: KeyHistory, hold: HoldInfo, at: float) -> None:
        for grant in known.grants:
            if (grant.token, grant.holder.owner) == _identity(lock, hold):
                grant.seen, grant.ended = at, 0.0
                return
        known.grants.insert(0, Grant(hold.who, lock.token, hold.since or at, at))
        self._keys.move_to_end(lock.key)

    def _end(self, key: str, at: float) -> None:
        self._held.discard(key)
        known = self._keys.get(key)
        for grant in known.grants if known else ():
            if not grant.ended:
                grant.ended = max(at, grant.seen)


def _identity(lock: KeyState, hold: HoldInfo) -> tuple[int, str]:
    return lock.token, hold.who.owner
