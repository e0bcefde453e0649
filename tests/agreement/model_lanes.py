"""A model of the lanes of a queue: which has its turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_distlock.stores.values import Want

    from .model import Member

__all__ = ["Lanes"]

UNIT = 1000  # by which a lane's tag rises for each unit, with share 1


class Lanes:
    """
    The lanes of a queue in which some have asked for one.

    Attributes:
        tags: By lane: when it has its turn, in units that others have had.
        open: The lanes that seem to have waiters.
        last: The tag of the last start.
    """

    def __init__(self) -> None:
        self.tags: dict[str, int] = {}
        self.open: set[str] = set()
        self.last = 0

    def enter(self, waiter: Member) -> None:
        lane = waiter.want.lane or ""
        if lane not in self.open:
            self.tags.setdefault(lane, 1)
            self.open.add(lane)

    def enter_first(self, waiter: Member) -> None:
        """Have a lane served before all others, for a run that has had its turn."""
        lane = waiter.want.lane or ""
        self.tags[lane] = 0
        self.open.add(lane)

    def next_of(self, queue: dict[str, Member], passed: set[str]) -> str | None:
        """Return the waiter that is next, of another lane than those that are *passed*."""
        for lane in sorted(self.open - passed, key=lambda lane: (self.tags[lane], lane)):
            waiters = [name for name, each in queue.items() if (each.want.lane or "") == lane]
            if waiters:
                return min(waiters, key=queue.__getitem__)
            self.open.remove(lane)
        return None

    def start(self, want: Want, queue: dict[str, Member]) -> None:
        """Count the start of a waiter, which is still in the queue."""
        lane = want.lane or ""
        tag = max(self.last, self.tags.get(lane, 0))
        share = want.share if want.lane is not None else UNIT
        self.tags[lane] = tag + math.ceil(want.counted() * UNIT * UNIT / share)
        self.last = tag
        if sum((each.want.lane or "") == lane for each in queue.values()) < 2:
            self.open.discard(lane)
