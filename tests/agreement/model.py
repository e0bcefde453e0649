"""
A model of a key, in plain Python: what is guaranteed of its grants, its queue and its runs.

`MODELLED` leaves out what would make it long: rates, delays, identities, upgrades, requests for
several keys, a run that wants something else when it comes again, one that only the store has,
and ends that a store may forget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from celery_distlock.stores.values import ALONE, Want

if TYPE_CHECKING:
    from celery_distlock.stores.values import Limit

__all__ = ["Grant", "Key", "Member"]

CLAIM, GRANT, UNSENT = 5.0, 1.0, 2.0  # seconds


@dataclass
class Grant:
    """What an owner has: units, or all of the key. One with a place is reserved."""

    owner: str
    run: str
    units: int
    ends: float
    slot: int = -1
    place: float = 0.0


@dataclass(order=True)
class Member:
    """A blocked owner, or a run: it waits, is with the broker or a worker, or both."""

    place: float
    run: str
    owner: str = ""
    want: Want = ALONE
    due: float = 0.0  # when a sweep looks for it
    sent: int = 0
    with_broker: bool = False


@dataclass
class Key:
    """What is known of a key; a run that stepped back is in flight and in the queue."""

    now: float = 0.0
    grants: dict[str, Grant] = field(default_factory=dict)  # by owner
    queue: dict[str, Member] = field(default_factory=dict)  # by owner or run
    flights: dict[str, Member] = field(default_factory=dict)  # by run
    done: set[str] = field(default_factory=set)
    settles: dict[str, float] = field(default_factory=dict)
    limit: Limit | None = None
    rest: float = 0.0
    capacity: int = 1
    called: set[str] = field(default_factory=set)
    woken: list[tuple[str, bool]] = field(default_factory=list)  # runs; whether the broker had them

    @property
    def is_alone(self) -> bool:
        return any(not each.units for each in self.grants.values())

    @property
    def most(self) -> int | None:
        return self.limit.capacity if self.limit else None

    def held_by(self, run: str) -> Grant | None:
        found = (each for each in self.grants.values() if run and each.run == run)
        return next((each for each in found if not each.place), None)

    def is_parked(self, run: str) -> bool:
        return run in self.queue or run in self.flights

    def place_of(self, run: str) -> float:
        known = self.queue.get(run) or self.flights.get(run)
        return known.place if known else 0.0

    def line(self) -> list[str]:
        """Return the waiters in their order."""
        return sorted(self.queue, key=lambda name: self.queue[name])

    def admits(self, want: Want, reserved: Grant | None = None) -> bool:
        """Say whether a request may enter now, or a claim of what is reserved."""
        if self.most == 0 or self.rest > self.now:
            return False
        others = [each for each in self.grants.values() if each is not reserved]
        of = self.most if self.most is not None else 0 if reserved else want.capacity
        fits = not of or sum(each.units for each in others) + want.counted() <= of
        return not others or (fits and not want.alone and not self.is_alone)

    def grant(self, owner: str, run: str, want: Want, lasts: float, place: float = 0.0) -> Grant:
        """Grant what is wanted, with the lowest free slot if it is one unit of several."""
        units = 0 if want.alone else want.counted()
        grant = self.grants[owner] = Grant(owner, run, units, self.now + lasts, place=place)
        self.capacity = want.capacity if want.alone or self.most is None else self.most
        if units == 1 and self.capacity > 1:
            taken = {each.slot for each in self.grants.values()}
            grant.slot = min({*range(len(taken))} - taken)
        return grant

    def hand_over(self, member: str = "", run: str = "", place: float = 0.0) -> bool:
        """Serve the waiters before *member*; say whether its turn has come."""
        while not self.is_alone:
            head = next(iter(self.line()), None)
            if head is None or head in (member, run) or 0 < place < self.queue[head].place:
                return True
            if not self.serve(head, self.queue[head]):
                return False
        return False

    def serve(self, head: str, waiter: Member) -> bool:
        """Serve the first waiter; say whether it has left the queue."""
        if held := self.held_by(waiter.run):
            self.put_off(head, waiter.want, held.ends)
        elif not self.admits(waiter.want):
            return False
        elif waiter.run:
            lasts = CLAIM * 2 ** min(len(self.flights), 2)
            self.grant(f"parked:{head}", head, waiter.want, lasts, waiter.place)
            if head not in self.flights:
                self.flights[head] = replace(waiter, due=self.now + UNSENT)
                self.woken.append((head, False))
        else:
            self.called.add(head)
            self.grant(head, "", waiter.want, GRANT, waiter.place)
        self.queue.pop(head, None)
        return True

    def make_room(self, place: float, want: Want) -> bool:
        """Have those step back that came after *place*, the last first, until *want* fits."""
        later = [each for each in self.grants.values() if each.place > place > 0]
        if self.admits(want):
            return False
        for grant in sorted(later, key=lambda each: -each.place):
            del self.grants[grant.owner]
            if grant.run in self.flights:
                self.queue[grant.run] = self.flights[grant.run]
            if self.admits(want):
                return True
        return False

    def put_off(self, run: str, want: Want, until: float) -> None:
        """Keep a second delivery until the first one has ended."""
        self.flights[run] = Member(self.place_of(run), run, "", want, until)
        self.queue.pop(run, None)

    def forget(self, run: str) -> None:
        self.queue.pop(run, None)
        self.flights.pop(run, None)

    def end(self, run: str) -> None:
        self.forget(run)
        self.done.add(run)
        self.settles.pop(run, None)
