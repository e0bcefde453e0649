"""
A model of a key, in plain Python: what is guaranteed of its grants, its queue and its runs.

It answers what callers can observe. It does not know for how long an end is remembered, when time
alone opens a key, and when a waiter is called only to look again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from celery_distlock.stores.values import ALONE, Want

from .model_lanes import Lanes
from .model_rates import Starts, Terms

if TYPE_CHECKING:
    from celery_distlock.stores.values import Limit

__all__ = ["Grant", "Key", "Member"]

CLAIM, GRANT, UNSENT = 5.0, 1.0, 2.0  # seconds
NEXT = 1e-6  # seconds between the places of two that come in the same moment
TIES, EPS = 1e-3, NEXT / 2  # seconds within which places are in the order of arrival
STRICT = 2 * 86400.0  # seconds for which a run that is not passed has its key


@dataclass
class Grant:
    """
    What an owner has: units, or all of the key.

    One with a place is reserved, and so is one of an owner that is named after its run.
    """

    owner: str
    run: str
    units: int
    ends: float
    slot: int = -1
    place: float = 0.0
    comes_again: bool = False  # another message of its run may arrive
    is_recalled: bool = False  # its holder is asked to leave
    upgrades: bool = False  # its owner waits until it has the key alone
    before: tuple[int, int, int] | None = None  # an upgrade: units, slot and capacity
    start: Terms | None = None  # that is reserved
    started: tuple[int, Terms] | None = None
    lane: str | None = None  # if it counts against the most of its lane

    @property
    def is_reserved(self) -> bool:
        return self.owner == f"parked:{self.run}"


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
    has_come: bool = False  # it has claimed the key, and only the store has its message
    is_deferred: bool = False  # it waits in flight for the end of an execution
    may_be_twice: bool = False  # the broker may have two of its messages
    was_delivered: bool = False  # it was parked by a worker
    recalls: int = 0  # 1: it is asked to leave when it begins; 2: it was asked


class Queue(dict[str, Member]):
    """The waiters, by owner or run, and their lanes if one has asked for a lane."""

    lanes: Lanes | None = None

    def __setitem__(self, name: str, waiter: Member) -> None:
        if self.lanes is None and waiter.want.lane is not None:
            self.lanes = Lanes()
            for each in self.values():
                self.lanes.enter(replace(each, want=ALONE))
        super().__setitem__(name, waiter)
        if self.lanes is not None:
            self.lanes.enter(waiter)

    def setdefault(self, name: str, waiter: Member) -> Member:  # type: ignore[override]
        if name not in self:
            self[name] = waiter
        return self[name]

    def next(self, passed: set[str]) -> str | None:
        if self.lanes is None:
            return min(self, key=self.__getitem__, default=None)
        return self.lanes.next_of(self, passed)


@dataclass
class Key:
    """What is known of a key; a run that stepped back is in flight and in the queue."""

    now: float = 0.0
    micros: int = 0  # the time since the epoch
    grants: dict[str, Grant] = field(default_factory=dict)  # by owner
    queue: Queue = field(default_factory=Queue)
    flights: dict[str, Member] = field(default_factory=dict)  # by run
    delayed: dict[str, Member] = field(default_factory=dict)  # by run
    times: dict[str, float] = field(default_factory=dict)  # when they join the queue, by run
    done: set[str] = field(default_factory=set)
    recalled: set[str] = field(default_factory=set)  # runs that were asked to leave
    settles: dict[str, float] = field(default_factory=dict)
    limit: Limit | None = None
    lane_limits: dict[str, Limit] = field(default_factory=dict)
    rest: float = 0.0
    capacity: int = 1
    starts: Starts = field(default_factory=Starts)
    called: set[str] = field(default_factory=set)
    woken: list[Member] = field(default_factory=list)  # as they were

    @property
    def is_alone(self) -> bool:
        return any(not each.units for each in self.grants.values())

    @property
    def most(self) -> int | None:
        return self.limit.capacity if self.limit else None

    def held_by(self, run: str) -> Grant | None:
        found = (each for each in self.grants.values() if run and each.run == run)
        return next((each for each in found if not each.is_reserved), None)

    def parked(self, run: str) -> Member | None:
        return self.flights.get(run) or self.queue.get(run) or self.delayed.get(run)

    def is_full(self, run: str, most: int) -> bool:
        return 0 < most <= len(self.queue) and not self.parked(run)

    def place_of(self, run: str) -> float:
        known = self.parked(run)
        return known.place if known else 0.0

    def line(self) -> list[str]:
        """Return the waiters in their order."""
        return sorted(self.queue, key=lambda name: self.queue[name])

    def line_up(self, waiter: Member) -> None:
        """Put a run behind all waiters."""
        self.forget(waiter.run)
        self.queue[waiter.run] = replace(waiter, place=self.new_place(waiter.want))

    def new_place(self, want: Want) -> float:
        """Return the place behind all waiters; less what it is ahead, behind those as far ahead."""
        place = max(self.now, *(each.place + NEXT for each in self.queue.values()), 0.0)
        if not want.ahead:
            return place
        place = round(place - want.ahead / 1000, 6)
        ties = [
            each.place for each in self.queue.values() if -EPS < each.place - place < TIES - EPS
        ]
        return max(ties) + NEXT if ties else place

    def admits(self, want: Want, reserved: Grant | None = None) -> bool:
        """Say whether a request may enter now, or a claim of what is reserved."""
        if not self.may_start(want, reserved) or self.most == 0 or self.rest > self.now:
            return False
        if not reserved and (self.is_capped(want) or any(e.upgrades for e in self.grants.values())):
            return False
        others = [each for each in self.grants.values() if each is not reserved]
        if reserved and want.lane in self.lane_limits and self.is_capped(want, reserved):
            return False
        of = self.most if self.most is not None else 0 if reserved else want.capacity
        fits = not of or sum(each.units for each in others) + want.counted() <= of
        return not others or (fits and not want.alone and not self.is_alone)

    def is_capped(self, want: Want, mine: Grant | None = None) -> bool:
        """Say whether its lane has the most units that it may have, without those of *mine*."""
        limit = self.lane_limits.get(want.lane or "")
        most = limit.capacity if limit else want.most or None
        others = [each for each in self.grants.values() if each is not mine]
        used = sum(each.units for each in others if each.lane == want.lane)
        return most == 0 or (most is not None and used > 0 and used + want.counted() > most)

    def terms(self, want: Want) -> Terms | None:
        """Return what rates ask of a start: those of an operator, or else of the request."""
        if self.limit and self.limit.rates:
            limits = [rate.limit for rate in self.limit.rates]
            return Terms(min(want.cost if want.rates else 1, *limits), self.limit.rates)
        return Terms(want.cost, want.rates) if want.rates else None

    def may_start(self, want: Want, reserved: Grant | None = None) -> bool:
        terms = self.terms(want)
        has_start = terms is None or (reserved is not None and reserved.start is not None)
        return has_start or not self.starts.opens_in(terms, self.micros)

    def start(self, grant: Grant, want: Want, place: float = 0.0) -> None:
        """Count a start: the reserved one, or else one of a request that came at *place*."""
        if terms := grant.start:
            self.starts.reserved -= terms.cost
        elif terms := self.terms(want):
            self.starts.space(terms, self.micros, self.micros_at(place or self.now))
        grant.start = None
        if terms:
            self.starts.count(terms, self.micros)
            grant.started = self.micros, terms

    def micros_at(self, place: float) -> int:
        return self.micros + round((place - self.now) * 1e6)

    def drop(self, owner: str) -> Grant | None:
        """Take back what an owner has, and the start that is reserved for it."""
        grant = self.grants.pop(owner, None)
        if grant and grant.start:
            self.starts.reserved -= grant.start.cost
            self.starts.take_back(grant.start)
            grant.start = None
        return grant

    def suits(self, reserved: Grant, want: Want, known: Want | None) -> bool:
        """Say whether what is reserved is what is wanted, which may differ from what was."""
        if want.alone or not reserved.units:
            return want.alone and not reserved.units
        used = sum(each.units for each in self.grants.values())
        fits = not want.capacity or used <= want.capacity or known in (want, None)
        return want.counted() <= reserved.units and fits

    def grant(self, owner: str, run: str, want: Want, lasts: float, place: float = 0.0) -> Grant:
        """Grant what is wanted, with the lowest free slot if it is one unit of several."""
        units = 0 if want.alone else want.counted()
        grant = self.grants[owner] = Grant(owner, run, units, self.now + lasts, place=place)
        grant.lane = want.lane if units else None
        self.capacity = want.capacity if want.alone or self.most is None else self.most
        if units == 1 and self.capacity > 1:
            taken = {each.slot for each in self.grants.values()}
            grant.slot = min({*range(len(taken))} - taken)
        return grant

    def hand_over(
        self, member: str = "", run: str = "", place: float = 0.0, want: Want = ALONE
    ) -> bool:
        """Serve the waiters before *member*; say whether its turn has come."""
        has_had_turn = run in self.flights and not self.is_capped(want)
        for grant in [each for each in self.grants.values() if each.upgrades]:
            if len(self.grants) == 1:
                self.upgrade(grant)
                self.called.add(grant.owner)
            return False
        passed: set[str] = set()
        while not self.is_alone:
            head = self.queue.next(passed)
            if head is None:
                self.queue.lanes = self.queue.lanes if self.queue else None
                return True
            waiter, is_mine = self.queue[head], head in (member, run)
            is_capped = (is_mine or not self.held_by(waiter.run)) and self.is_capped(waiter.want)
            if is_mine and not is_capped:
                return True
            if has_had_turn if self.queue.lanes else 0 < place < waiter.place:
                return True
            if is_capped:
                passed.add(waiter.want.lane or "")
            elif not self.serve(head, waiter):
                return False
        return False

    def reserve(self, owner: str, run: str, waiter: Member, lasts: float) -> None:
        grant = self.grant(owner, run, waiter.want, lasts, waiter.place)
        if self.queue.lanes:
            self.queue.lanes.start(waiter.want, self.queue)
        if terms := self.terms(waiter.want):
            self.starts.reserve(terms, self.micros, self.micros_at(waiter.place))
            grant.start = terms

    def serve(self, head: str, waiter: Member) -> bool:
        """Serve the first waiter; say whether it has left the queue."""
        if held := self.held_by(waiter.run):
            self.defer(waiter, held.ends)
        elif not self.admits(waiter.want):
            return False
        elif waiter.run:
            lasts = STRICT if waiter.want.strict else CLAIM * 2 ** min(len(self.flights), 2)
            self.reserve(f"parked:{head}", head, waiter, lasts)
            if head not in self.flights:
                self.flights[head] = replace(waiter, due=self.now + UNSENT)
                self.woken.append(Member(0.0, head))
        else:
            self.called.add(head)
            self.reserve(head, "", waiter, GRANT)
        self.queue.pop(head, None)
        return True

    def make_room(self, place: float, want: Want) -> bool:
        """Have those step back that came after *place*, the last first, until *want* fits."""
        strict = {run for run, each in self.flights.items() if each.want.strict}
        grants = [each for each in self.grants.values() if each.run not in strict]
        later = [each for each in grants if each.place > place > 0]
        if self.queue.lanes or self.admits(want):
            return False
        for grant in sorted(later, key=lambda each: -each.place):
            self.drop(grant.owner)
            if grant.run in self.flights:
                self.queue[grant.run] = self.flights[grant.run]
            if self.admits(want):
                return True
        return False

    def upgrade(self, grant: Grant) -> None:
        """Give the only holder the key alone."""
        grant.before = grant.units, grant.slot, self.capacity
        grant.units, grant.slot, grant.place, grant.upgrades = 0, -1, 0.0, False

    def downgrade(self, grant: Grant) -> None:
        """Give a holder what it had before; one unit, if it has always had the key alone."""
        alone = 1, 0 if (self.most or 0) > 1 else -1, self.most or 0
        grant.units, grant.slot, self.capacity = grant.before or alone
        grant.before = None

    def defer(self, waiter: Member, until: float) -> None:
        """Keep a second delivery until the first one has ended."""
        self.forget(waiter.run)
        self.flights[waiter.run] = replace(waiter, due=until, is_deferred=True)

    def recall(self, run: str) -> None:
        """Ask a run to leave: now, or when it begins."""
        held = self.held_by(run)
        if grant := held or self.grants.get(f"parked:{run}"):
            grant.is_recalled = True
        if held:
            held.comes_again = True
            self.recalled.add(run)
        if known := self.parked(run):
            known.recalls = 2 if held else 1

    def forget(self, run: str) -> None:
        for where in (self.queue, self.flights, self.delayed):
            where.pop(run, None)

    def end(self, run: str) -> None:
        self.forget(run)
        self.done.add(run)
        self.recalled.discard(run)
        self.settles.pop(run, None)
