"""The keys and channels of a server in this process."""

import bisect
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

Entries: TypeAlias = list[tuple[float, bytes]]  # score and member
Listener: TypeAlias = Callable[[bytes], object]
T = TypeVar("T")

TIDY_MS = 60_000  # between two searches for expired keys
_score, _member = itemgetter(0), itemgetter(1)


class RefusedError(Exception):
    """An error that the server answers with; *code*, ERR by default, comes first in its text."""

    def __init__(self, words: str, code: str = "ERR") -> None:
        super().__init__(f"{code} {words}")


class Hash(dict[bytes, bytes]):
    """A hash."""


class SortedSet:
    """
    A sorted set.

    An exception may be raised between any two lines of its methods. So only the scores are
    authoritative, and an order that may disagree with them is discarded.
    """

    __slots__ = ("_order", "scores")

    def __init__(self) -> None:
        self.scores: dict[bytes, float] = {}
        self._order: Entries | None = []

    def __len__(self) -> int:
        return len(self.scores)

    def add(self, member: bytes, score: float) -> None:
        """Add *member*, or change its score."""
        before = self.scores.get(member)
        order, self._order = self._order, None
        self.scores[member] = score
        if order is not None:
            if before is not None:
                del order[bisect.bisect_left(order, (before, member))]
            bisect.insort(order, (score, member))
            self._order = order

    def remove(self, members: Collection[bytes]) -> None:
        """Remove *members*, all of which must exist."""
        entries = [(self.scores[member], member) for member in members]
        order, self._order = self._order, None
        deque(map(self.scores.pop, members), maxlen=0)
        if order is not None:
            for entry in entries:
                del order[bisect.bisect_left(order, entry)]
            self._order = order

    def order(self) -> Entries:
        """Return all entries by score, then by member; the caller must not change the list."""
        if self._order is None:
            self._order = sorted((score, member) for member, score in self.scores.items())
        return self._order

    def rank(self, member: bytes) -> int | None:
        """Return the position of *member*, or None."""
        score = self.scores.get(member)
        return None if score is None else bisect.bisect_left(self.order(), (score, member))

    def between(self, low: float, low_open: bool, high: float, high_open: bool) -> Entries:
        """Return the entries with scores from *low* to *high*; an open end is excluded."""
        order = self.order()
        after: Callable[..., int] = bisect.bisect_right if low_open else bisect.bisect_left
        before: Callable[..., int] = bisect.bisect_left if high_open else bisect.bisect_right
        return order[after(order, low, key=_score) : before(order, high, key=_score)]

    def lexical(self, low: bytes, low_open: bool, high: bytes, high_open: bool) -> Entries:
        """Return the entries with members from *low* to *high*; their scores must be equal."""
        order = self.order()
        after: Callable[..., int] = bisect.bisect_right if low_open else bisect.bisect_left
        before: Callable[..., int] = bisect.bisect_left if high_open else bisect.bisect_right
        return order[after(order, low, key=_member) : before(order, high, key=_member)]


class _Key:
    """A value, and the time (ms) at which it expires; replaced as a whole."""

    __slots__ = ("expires_ms", "value")

    def __init__(self, value: Any, expires_ms: float = math.inf) -> None:
        self.value = value
        self.expires_ms = expires_ms


class Keyspace:
    """
    The server's keys and channels.

    Attributes:
        now_us: The server's time, microseconds since the epoch. It is constant within a script.
        published: Messages that were not delivered to listeners yet.
    """

    def __init__(self) -> None:
        self.now_us = 0
        self.published: deque[tuple[Listener, bytes]] = deque()
        self._listeners: dict[bytes, list[Listener]] = {}
        self._keys: dict[bytes, _Key] = {}
        self._tidy_at = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter([name for name in list(self._keys) if self.holds(name)])

    def turn(self, now_us: int) -> None:
        """Set the time to *now_us*; now and then remove expired keys."""
        self.now_us, now_ms = now_us, now_us / 1000
        if not self._tidy_at - TIDY_MS <= now_ms < self._tidy_at:
            self._tidy_at = now_ms + TIDY_MS
            for name in self._keys.copy():
                self._living(name)

    def _living(self, name: bytes) -> _Key | None:
        key = self._keys.get(name)
        if key is not None and key.expires_ms * 1000 <= self.now_us:
            del self._keys[name]
            return None
        return key

    def holds(self, name: bytes) -> bool:
        """Return whether the key exists."""
        return self._living(name) is not None

    def read(self, name: bytes, kind: type[T]) -> T | None:
        """Return the value of a key; None if it does not exist."""
        key = self._living(name)
        if key is None:
            return None
        if type(key.value) is not kind:
            words = "Operation against a key holding the wrong kind of value"
            raise RefusedError(words, "WRONGTYPE")
        value: T = key.value
        return value

    def put(self, name: bytes, value: object, expires_ms: float = math.inf) -> None:
        """Set the value and the expiry of a key."""
        self._keys[name] = _Key(value, expires_ms)

    def remove(self, name: bytes) -> bool:
        """Remove a key; return whether it existed."""
        there = self.holds(name)
        self._keys.pop(name, None)
        return there

    def expire(self, name: bytes, expires_ms: float) -> bool:
        """Let a key expire at that time; return whether it existed."""
        key = self._living(name)
        if key is None:
            return False
        if expires_ms * 1000 <= self.now_us:
            del self._keys[name]
        else:
            key.expires_ms = expires_ms
        return True

    def expires_ms(self, name: bytes) -> float | None:
        """Return when a key expires, infinity for never; None if it does not exist."""
        key = self._living(name)
        return None if key is None else key.expires_ms

    def subscribe(self, channel: bytes, listener: Listener) -> None:
        """Call *listener* with every message published on *channel* from now on."""
        self._listeners[channel] = [*self._listeners.get(channel, ()), listener]

    def unsubscribe(self, channel: bytes, listener: Listener) -> None:
        """Undo one :meth:`subscribe`."""
        others = [each for each in self._listeners.get(channel, ()) if each != listener]
        if others:
            self._listeners[channel] = others
        else:
            self._listeners.pop(channel, None)

    def publish(self, channel: bytes, message: bytes) -> int:
        """Publish *message*; return the number of listeners."""
        listeners = self._listeners.get(channel, ())
        self.published.extend((listener, message) for listener in listeners)
        return len(listeners)
