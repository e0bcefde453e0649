"""When the keys of a store in memory become due: see :class:`.timing.QueueStore`."""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from celery_distlock import clock
from celery_distlock.stores.channels import EventInbox, Inbox
from celery_distlock.stores.queue_parts import NO_CLAIM, Claim, Dues, Settled, Timetable
from celery_distlock.stores.values import WokenTask
from tests.oracle.memory_key import MemoryKey

__all__ = ["MemoryInbox", "MemoryTiming"]

CLAIM = 2.0  # seconds for which what is due is the ticker's to look at


class MemoryInbox(EventInbox):
    """An inbox of this process, found by its owner's name."""

    def __init__(self, owner: str, inboxes: dict[str, "MemoryInbox"]) -> None:
        super().__init__(owner)
        self._inboxes = inboxes
        inboxes[owner] = self

    def wait(self, timeout: float) -> None:
        if clock.wait(self.event, timeout):
            self.event.clear()

    def close(self) -> None:
        self._inboxes.pop(self.address, None)


class MemoryTiming(Timetable):
    """See the module. What it needs is set by the class that inherits from it."""

    _mutex: threading.RLock
    _inboxes: dict[str, MemoryInbox]
    _keys: dict[str, MemoryKey]

    def _forget_times(self) -> None:
        """Begin, or begin anew."""
        self._dues: dict[str, float] = {}  # by the local clock
        self._claimed: dict[str, str] = {}  # by which claim each is looked at just now
        self._claims = 0
        self._ticker = ""
        self._ticks_until = -math.inf

    def _entered(self, name: str) -> MemoryKey:
        raise NotImplementedError

    def _known(self, name: str) -> MemoryKey:
        raise NotImplementedError

    def _hand_on(self, name: str, state: MemoryKey) -> tuple[Any, WokenTask | None]:
        raise NotImplementedError

    def _sweep(self, name: str, now: float) -> Iterator[WokenTask]:
        raise NotImplementedError

    def _note_opening(self, name: str, state: MemoryKey, here: str = "") -> None:
        """
        Note when time lets the first in who waits, or one come who was sent before his time.

        Who is blocked and the first is called, but not who is *here* and told with the answer.
        """
        opening = state.due_in()
        if opening is not None:
            self.note_due({name: opening})
        if (owner := state.called_first(here)) in self._inboxes:
            self._inboxes[owner].call()

    def note_due(self, dues: Mapping[str, float]) -> None:
        now = clock.monotonic()
        with self._mutex:
            first = min(self._dues.values(), default=math.inf)
            for name, seconds in dues.items():
                known = math.inf if name in self._claimed else self._dues.get(name, math.inf)
                self._claimed.pop(name, None)
                self._dues[name] = min(known, now + seconds)
            ticker = self._inboxes.get(self._ticker)
            if ticker is not None and min(self._dues.values(), default=math.inf) < first:
                ticker.call()

    def claim_due(
        self, who: str, inbox: Inbox, seconds: float, settled: Settled = NO_CLAIM
    ) -> Claim:
        now = clock.monotonic()
        with self._mutex:
            self._settle(settled, now)
            if self._ticker not in ("", who) and now < self._ticks_until:
                return Claim(False, self._ticks_until - now)
            self._ticker, self._ticks_until = (who if seconds else ""), now + seconds
            if not seconds:
                return Claim(False, math.inf)
            due = sorted((at, name) for name, at in self._dues.items() if at <= now)
            self._claims += 1
            for _, name in due:
                self._dues[name] = now + CLAIM
                self._claimed[name] = str(self._claims)
            pause = max(0.0, min(self._dues.values(), default=math.inf) - now)
            late = now - due[0][0] if due else 0.0
            return Claim(True, pause, tuple(name for _, name in due), late, str(self._claims))

    def _settle(self, settled: Settled, now: float) -> None:
        for name, seconds in settled.again.items():
            if self._claimed.get(name) != settled.number:
                continue  # somebody has noted it anew
            del self._claimed[name], self._dues[name]
            if seconds is not None:
                self._dues[name] = now + seconds

    def ticker_inbox(self, who: str) -> Inbox:
        return MemoryInbox(who, self._inboxes)

    def wake_due(self, names: Sequence[str], again: dict[str, float | None]) -> Iterator[WokenTask]:
        wakes: list[WokenTask] = []
        with self._mutex:
            for name in names:
                wakes += self._sweep(name, clock.monotonic())
                state = self._keys.get(name)
                again[name] = state.due_in() if state is not None else None
        yield from wakes

    def dues(self) -> Dues:
        now = clock.monotonic()
        with self._mutex:
            ticker = self._ticker if now < self._ticks_until else ""
            first = min(self._dues.values(), default=now) - now
            return Dues(ticker, len(self._dues), first)
