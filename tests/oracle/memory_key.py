"""One key of a store in memory: who has it, who waits for it, and who may have it next."""

import bisect
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from celery_distlock import clock
from celery_distlock.naming import is_resting
from celery_distlock.stores.requests import AcquireRequest
from celery_distlock.stores.values import (
    ALONE,
    FIRST,
    MOST_HOLDERS,
    MOST_SLOTS,
    Holder,
    KeyState,
    Limit,
    ParkRequest,
    Reply,
    Route,
    Status,
    Waiter,
    Want,
)
from tests.oracle.memory_rates import StartLog

__all__ = [
    "AHEAD",
    "CLAIM",
    "DONE",
    "DOUBLINGS",
    "GRANT",
    "LOOK",
    "UNSENT",
    "Call",
    "MemoryKey",
    "Share",
    "Standing",
    "microseconds",
    "since_of",
]

# Seconds; what each is for stands in redis/scripts/grant.lua and queue.lua, which this mirrors.
GRANT = 1.0
CLAIM = 5.0
DOUBLINGS = 2
UNSENT = 2.0
DONE = 3600.0
COPIES = 31 * 86400.0
LOOK = 1.0
SOONER = 0.01
AHEAD = 1_000_000  # µs

_token_mutex = threading.RLock()  # a signal's handler may take a lock while its thread has this
_last_token = 0


def _next_token() -> int:
    """Return the time (µs), or more: never the same twice, so that no key need keep its last."""
    global _last_token  # noqa: PLW0603
    with _token_mutex:
        while True:
            token = max(_last_token + 1, time.time_ns() // 1000)
            if token > _last_token:  # else such a handler has come between
                _last_token = token
                return token


def microseconds() -> int:
    """Return the time that arrivals are told by."""
    return round(clock.monotonic() * 1e6)


def since_of(arrival: int, epoch: float) -> float:
    """Return the time of an arrival, in seconds since the epoch; 0: it tells none."""
    return epoch + arrival / 1e6 if arrival > FIRST else 0.0


@dataclass(order=True)
class Standing:
    """One place in the queue."""

    arrival: int  # µs, by the local clock
    member: str  # "p:<run>" or "b:<owner>"


@dataclass
class Share:
    """What one owner has of a key: all of it, or some units."""

    run: str
    units: int
    slot: int
    alone: bool
    until: float
    since: float
    due: int = 0  # when the one came who was handed it and has not come for it
    again: bool = False  # it asked to be parked twice: another message of it is on its way
    stamp: int = 0  # when one came that stands at several keys
    before: tuple[int, int, int] | None = None  # units, slot and capacity before it was alone

    def lengthen(self, seconds: float) -> None:
        """Make it last for so long from now, and never shorter."""
        self.until = max(self.until, clock.monotonic() + seconds)


class Call(NamedTuple):
    """Which run has an identity; times by the local clock."""

    run: str
    until: str | float
    first: float
    expires: float
    silent: bool
    fixed: bool


@dataclass
class MemoryKey:
    """See the module. What has lapsed is struck by :meth:`prune`, before anything is asked."""

    shares: dict[str, Share] = field(default_factory=dict)  # by owner, who came last the last
    token: int = 0
    capacity: int = 1
    rest_until: float = -math.inf
    limit: Limit | None = None
    limit_until: float = math.inf
    upgrading: str = ""  # who shares the key and waits for having it alone
    queue: list[Standing] = field(default_factory=list)
    wants: dict[str, Want] = field(default_factory=dict)  # by member
    envelopes: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of tasks
    arrivals: dict[str, int] = field(default_factory=dict)
    routes: dict[str, Route] = field(default_factory=dict)  # of those that stand at several keys
    came: set[str] = field(default_factory=set)  # of those parked, whose message was here before
    lapsed: set[str] = field(default_factory=set)  # for whom of those the key was kept before
    begun: set[str] = field(default_factory=set)  # those that have come, and may come again
    sends: dict[str, int] = field(default_factory=dict)
    woken: dict[str, float] = field(default_factory=dict)
    later: dict[str, float] = field(default_factory=dict)  # when they join the queue
    calls: dict[str, Call] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    unsettled: dict[str, float] = field(default_factory=dict)  # until when they are held back
    # Until when the end must be known of those of which the broker may have another message.
    copies: dict[str, float] = field(default_factory=dict)
    log: StartLog = field(default_factory=StartLog)

    def prune(self) -> "MemoryKey":
        """Strike what has lapsed."""
        now = clock.monotonic()
        for owner in [owner for owner, share in self.shares.items() if share.until <= now]:
            self.leave(owner)
        if self.limit_until <= now:
            self.limit, self.limit_until = None, math.inf
        self.log.prune(microseconds(), self.shares.__contains__)
        return self

    # Who has it

    @property
    def is_alone(self) -> bool:
        """Whether somebody has all of it."""
        return any(share.alone for share in self.shares.values())

    @property
    def used(self) -> int:
        """How many units are in use."""
        return sum(share.units for share in self.shares.values() if not share.alone)

    @property
    def rests(self) -> bool:
        """Whether nobody is to enter."""
        return clock.monotonic() < self.rest_until

    @property
    def in_use(self) -> bool:
        """Whether there is anything to see."""
        waits = self.queue or self.travelling or self.later
        return bool(self.shares or waits or self.limit or self.rests)

    @property
    def travelling(self) -> list[str]:
        """Return the runs on their way."""
        return [run for run in self.woken if not self.holds(run)]

    def share_for(self, run: str) -> Share | None:
        """Return what is kept for a run."""
        return self.shares.get(f"parked:{run}") if run else None

    def holds(self, run: str) -> str:
        """Return the owner by which a run has the key itself, not only a claim to it."""
        own = f"parked:{run}"
        owners = (owner for owner, share in self.shares.items() if share.run == run)
        return next((owner for owner in owners if run and owner != own), "")

    def stamp_of(self, run: str) -> int:
        """Return when a run came that stood at several keys and has had its part here; or 0."""
        stamps = (share.stamp for share in self.shares.values() if share.run == run)
        return next(stamps, 0)

    def last_holder(self) -> tuple[str, Share | None]:
        """Return one who has it, for those who look."""
        return next(reversed(self.shares.items()), ("", None))

    def remaining(self) -> float:
        """Return the seconds until the first of those who have it may have left."""
        now = clock.monotonic()
        ends = [share.until for share in self.shares.values()]
        if not ends and (self.rests or self.queue or self.limit):
            return LOOK
        return max(0.0, min(ends) - now) if ends else 0.0

    def opens_in(self) -> float | None:
        """Return in how many seconds time may let the first in who waits; None: not time alone."""
        if not self.queue:
            return None
        if (by_rate := self.opens_by_rate(self.wants.get(self._next_member(), ALONE))) is not None:
            return by_rate
        rests = [s.until for owner, s in self.shares.items() if is_resting(owner)]
        if self.is_alone:
            ends = rests
        elif self.limit is not None and self.limit.pauses:
            ends = [self.limit_until]
        elif self.rests:
            ends = [self.rest_until]
        else:
            ends = [*rests, self.limit_until]
        left = min(ends, default=math.inf) - clock.monotonic()
        return None if left == math.inf else max(0.0, left)

    def opens_by_rate(self, want: Want) -> float | None:
        """
        Return in how many seconds rates let so much in that is free; None: it is not for them.

        Or in how many an operator's end, if that is sooner.
        """
        if not (self._in_force(want).rates and self.fits(want)):
            return None
        opens = self.starts_in(want) / 1e6
        if self.limit is not None and self.limit.rates:
            opens = min(opens, self.limit_until - clock.monotonic())
        return max(0.0, opens)

    def called_first(self, here: str) -> str:
        """Return who is to be called, as `call_first` of queue.lua does it; empty: nobody."""
        member, opening = self._next_member(), self.opens_in()
        if not (self.log.in_use and member.startswith("b:")) or opening is None:
            return ""
        known, looks = self.log.looks
        at = clock.monotonic() + opening
        if known == member != here and looks <= at + SOONER:
            return ""
        self.log.looks = member, at
        return "" if member == here else member.removeprefix("b:")

    def due_in(self) -> float | None:
        """Return in how many seconds time may change something here; None: not time alone."""
        opening = self.opens_in()
        dues = [due - clock.monotonic() for due in self.later.values()]
        dues += [] if opening is None else [opening]
        return max(0.0, min(dues)) if dues else None

    def _next_member(self) -> str:
        """Return the first who waits and has no part of it yet."""
        runs = {run for run in self.routes if self.share_for(run)}
        members = (each.member for each in self.queue)
        return next((m for m in members if m.removeprefix("p:") not in runs), "")

    # Admission

    def _allowed(self, want: Want) -> int:
        """Return how many units there are for *want*; 0: any number."""
        limit = None if self.limit is None else self.limit.capacity
        return want.capacity if limit is None else limit

    def admits(self, want: Want) -> bool:
        """Whether so much may be taken now, if it is one's turn."""
        return self.fits(want) and not self.starts_in(want)

    def _in_force(self, want: Want) -> Want:
        """Return *want* with the rates that count: an operator's go before those asked with."""
        if self.limit is None or not self.limit.rates:
            return want
        rates = self.limit.rates
        cost = min(want.cost, *(rate.limit for rate in rates))  # else it would never start
        return want._replace(rates=rates, cost=cost)

    def starts_in(self, want: Want, now: int | None = None) -> float:
        """Return in how many µs one may start by its rates; 0: now, or then."""
        return self.log.starts_in(self._in_force(want), microseconds() if now is None else now)

    def start(self, owner: str, want: Want, came: int = 0) -> None:
        """Count a start of one who came then; 0: now."""
        now = microseconds()
        self.log.start(owner, self._in_force(want), now, came or now)

    def fits(self, want: Want) -> bool:
        """Whether so much of it is free."""
        if (self.limit is not None and self.limit.pauses) or self.rests:
            return False
        if not self.shares:
            return True
        if want.alone or self.is_alone or self.upgrading:
            return False
        of = self._allowed(want)
        return of == 0 or self.used + want.counted() <= of

    def take(self, owner: str, run: str, want: Want, lease: float, *, came: int = 0) -> Share:
        """Grant so much; who asks has seen that it may be."""
        share = self._admit(owner, run, want, lease)
        self.start(owner, want, came)
        return share

    def _admit(self, owner: str, run: str, want: Want, lease: float, due: int = 0) -> Share:
        if want.alone or not self.shares:
            self.token = _next_token()
        now, since = clock.monotonic(), clock.wall()
        units, of = (0, 1) if want.alone else (want.counted(), self._allowed(want))
        slot = -1
        if not want.alone and units == 1 and 1 < of <= MOST_SLOTS:
            taken = {share.slot for share in self.shares.values()}
            slot = next(slot for slot in range(of) if slot not in taken)
        self.capacity = of
        share = Share(run, units, slot, want.alone, now + lease, since, due)
        self.shares[owner] = share
        return share

    def reserve(self, owner: str, run: str, want: Want, lease: float, due: int) -> Share:
        """Grant so much to one who has to come for it, and who came then."""
        share = self._admit(owner, run, want, lease, due)
        self.log.reserve(owner, self._in_force(want), microseconds(), due)
        return share

    def leave(self, owner: str) -> Share | None:
        """Take from an owner what it has."""
        share = self.shares.pop(owner, None)
        self.log.leave(owner)
        self.log.started.pop(owner, None)
        if share is not None and self.upgrading == owner:
            self.upgrading = ""
        return share

    def pass_on(self, owner: str, another: str, run: str, seconds: float) -> Share:
        """Give the share of one owner to another, who may have another run."""
        share = self.shares.pop(owner)
        share.run, share.due = run, 0
        if owner != another:
            share.until = -math.inf
            self.log.started.pop(owner, None)
            self.upgrading = "" if self.upgrading == owner else self.upgrading
        share.lengthen(seconds)
        self.shares[another] = share
        return share

    def become_alone(self, owner: str, lease: float) -> None:
        """Give one who shares the key with nobody all of it."""
        share = self.shares[owner]
        self.upgrading, self.token = "", _next_token()
        share.before = share.units, share.slot, self.capacity
        share.alone, share.units, share.slot, share.since = True, 0, -1, clock.wall()
        share.lengthen(lease)

    def become_shared(self, owner: str, lease: float) -> None:
        """Have one share with any number what it had alone."""
        share = self.shares.pop(owner)
        if self.upgrading == owner:
            self.upgrading = ""
        left = max(share.until - clock.monotonic(), lease)
        now = self._admit(owner, share.run, Want(1, 0), left)
        now.again = share.again
        if share.before is not None:
            now.units, now.slot, self.capacity = share.before

    def step_back(self, owner: str) -> None:
        """Take the key from one who has not come for it; a run has its place back."""
        share = self.leave(owner)
        assert share is not None
        if owner == f"parked:{share.run}" and share.run in self.envelopes:
            self.join(f"p:{share.run}", share.due)

    def make_room(self, stands: int, want: Want) -> bool:
        """Have those step back who came after *stands*, and have not come, the last one first."""
        later = [(share.due, owner) for owner, share in self.shares.items() if share.due > stands]
        for _, owner in sorted(later, reverse=True):
            self.step_back(owner)
            if self.admits(want):
                return True
        return False

    # Runs

    def knows_end(self, run: str) -> bool:
        """Whether a run has ended, or its result is being stored."""
        return run in self.done or clock.monotonic() < self.unsettled.get(run, -math.inf)

    def note_end(self, run: str) -> None:
        """Remember that a run has ended."""
        now = clock.monotonic()
        self.done[run] = max(now, self.copies.pop(run, now))
        self.unsettled.pop(run, None)

    def expect_copy(self, run: str) -> None:
        """Note that the broker may have another message of a run, which may come after its end."""
        self.copies[run] = clock.monotonic() + COPIES

    def keep(self, run: str, park_request: ParkRequest) -> None:
        """Keep a run's message."""
        self.envelopes[run] = park_request.envelope
        self.names[run] = park_request.task

    def receive(self, run: str, park_request: ParkRequest) -> None:
        """Keep a run's message that has come, whenever it was to."""
        self.keep(run, park_request)
        self.came.add(run)
        self.later.pop(run, None)

    def unpark(self, run: str) -> bool:
        """Strike a run from the parked ones; true if it was there."""
        if self.envelopes.pop(run, None) is None:
            return False
        self.names.pop(run, None)
        self.arrivals.pop(run, None)
        self.routes.pop(run, None)
        self.lapsed.discard(run)
        self.came.discard(run)
        self.begun.discard(run)
        self.sends.pop(run, None)
        self.woken.pop(run, None)
        self.later.pop(run, None)
        self.leave_queue(f"p:{run}")
        self.wants.pop(f"p:{run}", None)
        return True

    def arrive(self, run: str, keep: float | None) -> None:
        """Note that a run has come; its message is kept for *keep* seconds, or not any more."""
        if keep is None or run not in self.envelopes:
            self.unpark(run)
        else:
            self.leave_queue(f"p:{run}")
            self.begun.add(run)
            self.woken[run] = clock.monotonic() + keep

    def set_aside(self, run: str, until: float) -> None:
        """Let a second delivery keep nobody from entering while the first one runs."""
        self.leave_queue(f"p:{run}")
        self.woken[run] = until

    def park(
        self, run: str, park_request: ParkRequest, stands: int, want: Want, *, came: bool = True
    ) -> int:
        """Keep a run in the queue, whose message *came*, or there is none yet."""
        if came:
            self.receive(run, park_request)
        else:
            self.keep(run, park_request)
        self.begun.discard(run)
        self.sends.pop(run, None)
        self.woken.pop(run, None)
        self.arrivals[run] = self.join(f"p:{run}", stands, want)
        return self.arrivals[run]

    # The queue

    def join(self, member: str, arrival: int = 0, want: Want | None = None) -> int:
        """Join the queue, where it is not there yet; return the arrival."""
        if want is not None:
            self.wants[member] = want
        for waiter in self.queue:
            if waiter.member == member:
                return waiter.arrival
        if not arrival:
            last = self.queue[-1].arrival if self.queue else 0
            arrival = max(microseconds(), last + 1)
        bisect.insort(self.queue, Standing(arrival, member))
        return arrival

    def put_first(self, run: str) -> bool:
        """Put a run that waits before all who do; false: it does not wait."""
        if not self.leave_queue(f"p:{run}"):
            return False
        self.arrivals[run] = self.join(f"p:{run}", FIRST)
        return True

    def leave_queue(self, member: str) -> bool:
        """Leave the queue; false: it was not there."""
        before = len(self.queue)
        self.queue = [waiter for waiter in self.queue if waiter.member != member]
        if member.startswith("b:"):
            self.wants.pop(member, None)
        return len(self.queue) < before

    def next_in_line(self, passed: int) -> Standing:
        """Return the first; before one whose turn has lapsed, who is blocked here goes, once."""
        head = self.queue[passed]
        run = head.member.removeprefix("p:")
        if run in self.lapsed and not self.share_for(run):
            self.lapsed.discard(run)
            return next((each for each in self.queue if each.member.startswith("b:")), head)
        return head

    def place(self, member: str) -> int:
        """Return how many are before it."""
        members = [waiter.member for waiter in self.queue]
        return members.index(member) if member in members else len(members)

    def keep_for(self, run: str, arrival: int, seconds: float, want: Want) -> Share:
        """Reserve the key for one who needs others, too, and stays the first in the queue."""
        self.lapsed.add(run)
        return self.reserve(f"parked:{run}", run, want, seconds, arrival)

    # Answers

    def granted(self, owner: str, asked_at: float) -> Reply:
        """Return what one is told who has it."""
        return Reply(Status.GRANTED, asked_at, self.token, slot=self.shares[owner].slot)

    def taken(self, status: Status, member: str, asked_at: float, stands: int) -> Reply:
        """Return what one is told who has not got the key."""
        holder, share = self.last_holder()
        run, left, place = (share.run if share else ""), self.remaining(), self.place(member)
        if place == 0 and (opening := self.opens_in()) is not None:
            left = opening
        token = self.token if holder else 0
        return Reply(status, asked_at, token, holder, run, left, place, arrival=stands)

    def second_delivery(self, request: AcquireRequest, asked_at: float) -> Reply:
        """Return what a second delivery is told of a run whose end is known, or nearly so."""
        run, queue = request.run, request.queue
        if run in self.done:
            return Reply(Status.DONE, asked_at)
        until = self.unsettled[run]
        status = Status.BUSY
        if isinstance(queue, ParkRequest):
            self.receive(run, queue)
            self.woken[run] = until
            status = Status.PARKED
        return Reply(status, asked_at, holder_run=run, remaining=until - clock.monotonic())

    def put_off(self, request: AcquireRequest, owner: str, asked_at: float) -> Reply:
        """Return what it is told while *owner* runs the first one beside others."""
        run, queue, status = request.run, request.queue, Status.BUSY
        until = self.shares[owner].until
        self.leave_queue(f"b:{request.owner}")
        if isinstance(queue, ParkRequest):
            self.receive(run, queue)
            self.begun.discard(run)
            self.sends.pop(run, None)
            self.set_aside(run, until)
            status = Status.PARKED
        left = until - clock.monotonic()
        return Reply(status, asked_at, self.token, owner, run, left)

    def look(self, epoch: float) -> KeyState:
        """Return what somebody sees who looks."""
        due = min(self.later.values(), default=0.0) - clock.monotonic()
        state = self._look(epoch)
        return state._replace(later=len(self.later), due=max(0.0, due), opens=self.opens_in())

    def _look(self, epoch: float) -> KeyState:
        known = (since for waiter in self.queue if (since := since_of(waiter.arrival, epoch)))
        oldest = next(known, 0.0)
        waits = len(self.queue), oldest, len(self.travelling)
        rest = max(0.0, self.rest_until - clock.monotonic())
        if not self.shares:
            state = KeyState("", 0, "", 0.0, 0.0, *waits)
            return state._replace(limit=self.limit, rest=rest, starts=self.log.counted())
        owner, share = next(iter(self.shares.items()))
        left = share.until - clock.monotonic()
        alone = share.alone
        task = self.names.get(share.run, "") if alone and owner == f"parked:{share.run}" else ""
        return KeyState(
            owner,
            self.token,
            share.run,
            share.since,
            left,
            *waits,
            task,
            () if alone else tuple(self._holders())[:MOST_HOLDERS],
            self.used,
            1 if alone else self.capacity,
            self.limit,
            rest,
            self.log.counted(),
        )

    def _holders(self) -> Iterator[Holder]:
        by_age = sorted(self.shares.items(), key=lambda each: each[1].since)
        for owner, share in by_age:
            left = share.until - clock.monotonic()
            task = self.names.get(share.run, "") if owner == f"parked:{share.run}" else ""
            yield Holder(owner, share.run, share.units, share.slot, share.since, left, task)

    def parked_waiter(self, run: str, epoch: float) -> Waiter:
        """Return a parked run with its message."""
        since = since_of(self.arrivals.get(run, 0), epoch)
        woken, task = run in self.woken, self.names.get(run, "")
        want = self.wants.get(f"p:{run}", ALONE)
        route = self.routes.get(run)
        return Waiter("", run, since, self.envelopes[run], woken, task, route, want)
