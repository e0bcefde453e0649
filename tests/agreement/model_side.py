"""A model as one side of a comparison: it plays a schedule and says what callers see."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from celery_distlock import clock
from celery_distlock.stores.queue_parts import Sent
from celery_distlock.stores.values import ALONE, Completion, Limit, RenewOutcome, Status, Want

from .model import CLAIM, UNSENT, Grant, Key, Member
from .schedules import LEASE

if TYPE_CHECKING:
    from .schedules import Step

__all__ = ["ModelSide"]

RESEND = 60.0  # seconds, doubled each time
NEXT = 1e-6  # seconds between the places of two that come in the same moment


class Request(NamedTuple):
    """A request for a key."""

    mode: str
    owner: str
    run: str
    want: Want
    redelivered: bool = False
    retains: bool = False

    @property
    def parks(self) -> bool:
        return self.mode in ("park", "line")

    @property
    def member(self) -> str:
        return self.owner if self.mode == "wait" else self.run


class _Answers(Key):
    """A key that answers the steps of a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}  # by owner
        self._wants: dict[str, Want] = {}  # by run
        self._wakes: set[str] = set()
        self._listens: set[str] = set()

    def play(self, step: Step) -> Any:
        """Take back what has lapsed, and answer."""
        self.now = round(clock.monotonic(), 6)
        self.grants = {name: each for name, each in self.grants.items() if each.ends > self.now}
        facts = step.facts if step.facts[0] in self.requests else step.facts[1:]
        if step.verb == "line":
            return self._ask(Request("line", "", *facts))
        if step.verb in ("acquire", "park", "wait"):
            return self._ask(Request(step.verb, *facts))
        return getattr(self, f"_{step.verb}")(*facts)

    def _noted(self) -> tuple[Any, ...]:
        woken, self.woken = self.woken, []
        self._wakes.update(run for run, _ in woken)
        return tuple((run, f"envelope of {run}".encode(), False, sent) for run, sent in woken)

    # Requests for the key

    def _claim(self, owner: str, run: str, _: bool) -> Any:
        if run not in self._wakes:
            return None
        return self._ask(Request("acquire", owner, run, self._wants[run], redelivered=True))

    def _again(self, owner: str) -> Any:
        request = self.requests[owner]
        return None if request.mode == "wait" and owner not in self._listens else self._ask(request)

    def _ask(self, request: Request) -> Any:
        self.requests[request.owner] = request
        if request.mode == "wait":
            self._listens.add(request.owner)
        if request.mode != "acquire":
            self._wants[request.run] = request.want
        status, *facts = self._answer(request)
        return (status, self._noted(), *facts, *[False] * bool(facts))

    def _answer(self, request: Request) -> Any:
        """Answer a second delivery, a holder, a claim, or a request of another."""
        mine, reserved = map(self.grants.get, (request.owner, f"parked:{request.run}"))
        place = self.place_of(request.run)
        if reserved and request.mode == "wait":
            self.queue.pop(request.owner, None)
        came = [each for each in (mine, reserved) if each]
        is_new = came and not (mine and mine.run == request.run)
        if is_new and (answer := self._answer_second(request, *came)):
            return answer
        for grant in came:
            if request.mode == "line":
                return (Status.DONE,)
            if not grant.place or self.admits(request.want, grant):
                return self._come(request, grant)
            del self.grants[grant.owner]
            place = place or grant.place
        if answer := self._answer_second(request):
            return answer
        if request.mode != "line" and (granted := self._enter(request, place)):
            return self._come(request, granted)
        return self._join(request, place, has_left=reserved is not None)

    def _answer_second(self, request: Request, *came: Grant) -> Any:
        """Answer a run that has ended, or for which another owner has the key."""
        run, other = request.run, None if self.is_alone else self.held_by(request.run)
        asks = request.redelivered or (request.parks and not came)
        if not run or (came and self.is_parked(run)):
            asks = False
        ended, settles = asks and run in self.done, asks and self.settles.get(run, 0.0)
        if not (ended or settles > self.now or other):
            return None
        for grant in came:
            del self.grants[grant.owner]
            self.hand_over()
        if request.mode == "wait":
            self.queue.pop(request.owner, None)
        if ended:
            return (Status.DONE,)
        is_held = not settles > self.now
        if request.parks:
            self.put_off(run, request.want, other.ends if other and is_held else settles)
        return (Status.PARKED if request.parks else Status.BUSY, is_held, 0)

    def _enter(self, request: Request, place: float) -> Grant | None:
        """Serve those before the request; grant it the key if it is the next and fits."""
        run, want = request.run, request.want
        is_next = self.make_room(place, want)
        is_next = is_next or (want.alone and not self.grants and run in self.flights)
        is_next = is_next or self.hand_over(request.member, run, place)
        if not is_next or not self.admits(want):
            return None
        self.queue.pop(request.member, None)
        return self.grant(request.owner, "", want, LEASE)

    def _come(self, request: Request, grant: Grant) -> Any:
        """Make the owner the holder of a grant."""
        for owner in (grant.owner, f"parked:{request.run}"):
            self.grants.pop(owner, None)
        if grant.run != request.run or grant.place:
            self.forget(request.run)
        grant.owner, grant.run, grant.place = request.owner, request.run, 0.0
        grant.ends = max(grant.ends, self.now + LEASE)
        self.grants[request.owner] = grant
        self.hand_over()
        return (Status.GRANTED, grant.slot)

    def _join(self, request: Request, place: float, *, has_left: bool = False) -> Any:
        """Put one that has to wait into the queue, or back into it."""
        place = place or max(self.now, *(each.place + NEXT for each in self.queue.values()), 0.0)
        if request.mode == "wait":
            waiter = Member(place, "", request.owner, request.want)
        else:
            waiter = Member(place, request.run, "", request.want)
        if request.mode != "acquire" or (has_left and request.run in self.flights):
            self.queue.setdefault(request.member, waiter)
        if request.parks:
            self.flights.pop(request.run, None)
        line = self.line()
        at = line.index(request.member) if request.member in line else len(line)
        return (Status.PARKED if request.parks else Status.BUSY, bool(self.grants), at)

    def _send(self, run: str, want: Want, *_: Any) -> Any:
        self._wants[run], reserved = want, self.grants.get(f"parked:{run}")
        if self.held_by(run) or self.is_parked(run):
            goes = reserved is not None and run in self.flights and not self.held_by(run)
        else:
            self.done.discard(run)
            self.settles.pop(run, None)
            self.grants.pop(f"parked:{run}", None)
            self._join(Request("line", "", run, want), 0.0)
            self.hand_over()
            if goes := run in self.flights:
                self.woken.remove((run, False))
                self.flights[run].with_broker = True
        self._wakes |= {run} if goes else set()
        return (Sent.GO if goes else Sent.QUEUED, self._noted())

    # Requests of an owner

    def _release(self, owner: str, ended: Completion, *_: Any) -> Any:
        self._complete(self.requests[owner].run, ended)
        waited = self.queue.pop(owner, None)
        self._listens.discard(owner)
        self.called.discard(owner)
        grant = self.grants.pop(owner, None)
        if grant or waited:
            self.hand_over()
        woken = self._noted()
        return (grant is not None or bool(woken), woken)

    def _complete(self, run: str, ended: Completion) -> None:
        held, flight = self.held_by(run), self.flights.get(run)
        known = self.queue.get(run) or flight
        if run and ended is Completion.UNSETTLED:
            self.settles[run] = max(held.ends if held else 0.0, self.now + CLAIM)
            if known:
                self.put_off(run, known.want, self.settles[run])
        elif run and ended is not Completion.NO:
            self.end(run)
        elif flight and held and not self.is_alone and self.settles.get(run, 0.0) <= self.now:
            flight.due = self.now

    def _renew(self, owner: str) -> Any:
        if owner not in self.grants:
            return RenewOutcome.HELD if self.is_alone else RenewOutcome.LOST
        self.grants[owner].ends = max(self.grants[owner].ends, self.now + LEASE)
        return RenewOutcome.RENEWED

    def _rest(self, owner: str) -> Any:
        self.rest = self.now + LEASE if owner in self.grants else self.rest
        return owner in self.grants

    # What operators, workers and sweeps do

    def _limit(self, limit: Limit | None) -> Any:
        self.limit = limit
        self.hand_over()
        return self._noted()

    def _woken(self, run: str, what: str, mark: bool) -> Any:
        if run not in self._wakes:
            return None
        if what == "drop":
            settles = run in self.settles and run not in self.done
            is_known = settles or f"parked:{run}" in self.grants or run in self.flights
            return self._removed(run, is_known=is_known, mark=mark)
        if flight := self.flights.get(run):
            flight.sent, flight.with_broker = flight.sent + 1, True
            flight.due = self.now + RESEND * 2 ** (flight.sent - 1)
            if what == "mark_returned":
                self.settles.pop(run, None)
                flight.due, flight.sent, flight.with_broker = 0.0, 0, False
        return None

    def _cancel(self, run: str) -> Any:
        may_run = self.held_by(run) or run in self.settles
        return self._removed(run, is_known=self.is_parked(run) and not may_run, mark=True)

    def _removed(self, run: str, *, is_known: bool, mark: bool) -> Any:
        if is_known:
            self.forget(run)
            if mark:
                self.end(run)
            self.grants.pop(f"parked:{run}", None)
            self.hand_over()
        return (is_known, self._noted())

    def _sweep(self) -> Any:
        for run, flight in sorted(self.flights.items(), key=lambda each: (each[1].due, each[0])):
            if flight.due <= self.now:
                self._look_for(run, flight)
        self.hand_over()
        return [(each,) for each in self._noted()]

    def _look_for(self, run: str, flight: Member) -> None:
        """Find a run again that is in flight and has not come."""
        if held := self.held_by(run):
            flight.due = flight.due and held.ends
        elif run in self.queue and not flight.with_broker:
            del self.flights[run]
        else:
            flight.due = self.now + UNSENT
            self.woken.append((run, flight.sent > 0))

    def _look(self) -> Any:
        holders = sorted((g.owner, g.run, g.units, g.slot) for g in self.grants.values())
        one, holders = (holders[0][:2], []) if self.is_alone else (("", ""), holders)
        limit = self.limit and (self.limit.capacity, self.limit.author)
        used, capacity = sum(each[2] for each in holders), self.capacity if holders else 1
        several = used, capacity, limit, self.rest > self.now, ()
        state = (one, (True, 0), bool(self.grants), len(self.queue), holders, several)
        woken = [("", run, True, ALONE) for run in self.flights if not self.held_by(run)]
        line = [self.queue[name] for name in self.line()]
        queued = [(each.owner, each.run, False, each.want) for each in line]
        return (state, (sorted(woken), queued), False)


class ModelSide:
    """See the module."""

    def __init__(self, *, hears: bool = True) -> None:
        self._keys = {"a": _Answers(), "b": _Answers()}
        self._hears = hears

    def play(self, step: Step) -> Any:
        """Return what callers see of a store that does as guaranteed."""
        first = step.facts[0]
        keys = [key for name, key in self._keys.items() if first == name or first in key.requests]
        if not keys:
            return None  # time passes, or an owner has asked for nothing
        answer = keys[0].play(step)
        if step.verb != "look":
            return answer
        called = sorted(owner for key in self._keys.values() for owner in key.called)
        for key in self._keys.values():
            key.called.clear()
        return (*answer, called if self._hears else [])

    def close(self) -> None:
        """Nothing is open."""
