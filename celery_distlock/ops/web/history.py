"""
The latest holders of each key, as seen in the snapshots of the page's server.

The store keeps no history, which would make locks more expensive. So this one has what the
snapshots contained while the page was open, and is lost when the server stops.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_distlock.stores.holders import Holder, HoldInfo
from celery_distlock.stores.values import KeyState

MOST_KEYS = 10_000  # keys with a history; about 20 MB
MOST_GRANTS = 8  # grants per key, or all current ones if those are more


@dataclass(slots=True)
class Grant:
    """
    A current or former grant of a key. All times are in seconds since the epoch.

    Attributes:
        holder: The holder.
        token: The fencing token, which is the same for all holders that share the key.
        since: When it was granted, or first seen if its record has no time.
        seen: When it was last seen.
        ended: When it had ended at the latest; 0: it is current.
    """

    holder: Holder
    token: int
    since: float
    seen: float
    ended: float = 0.0


@dataclass(slots=True)
class KeyHistory:
    """
    The history of one key.

    Attributes:
        grants: The latest grants, the newest first.
        most_waiting: The most waiters in a snapshot.
        longest_wait: The longest wait of the first in the queue, in seconds.
    """

    grants: list[Grant] = field(default_factory=list)
    most_waiting: int = 0
    longest_wait: float = 0.0


class History:
    """See the module. Its methods may be called from any thread."""

    def __init__(self) -> None:
        self._keys: OrderedDict[str, KeyHistory] = OrderedDict()  # the latest change last
        self._held: set[str] = set()
        self._mutex = threading.Lock()
        self.since = 0.0  # the first snapshot, in seconds since the epoch

    def note_all(self, locks: Iterable[KeyState], at: float, *, whole: bool) -> None:
        """Add a snapshot taken at the time *at*; *whole*: it contains all keys."""
        with self._mutex:
            self.since = self.since or at
            found = set()
            for lock in locks:
                found.add(lock.key)
                self._note(lock, at)
            for key in self._held - found if whole else ():
                self._end(key, at)

    def note(self, lock: KeyState, at: float) -> None:
        """Add the state of one key, which may be free."""
        with self._mutex:
            self.since = self.since or at
            self._note(lock, at)

    def of(self, key: str) -> KeyHistory:
        """Return a copy of the history of *key*."""
        with self._mutex:
            known = self._keys.get(key, KeyHistory())
            return KeyHistory(list(known.grants), known.most_waiting, known.longest_wait)

    def _note(self, lock: KeyState, at: float) -> None:
        held = [hold for hold in lock.holds if hold.state == "held"]
        known = self._keys.get(lock.key)
        if held and known and lock.token < max((each.token for each in known.grants), default=0):
            return  # older than a snapshot that was added before it
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
        """Set the end of grants that are not current: now, or when the next grant began."""
        now = {_identity(lock, hold) for hold in held}
        first = min((hold.since for hold in held if hold.since), default=at)
        for grant in known.grants:
            if not grant.ended and (grant.token, grant.holder.owner) not in now:
                passed_on = grant.token != lock.token  # an equal token: others still share it
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
