"""A model of requests for a key: claims, second deliveries, turns, and those that have to wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from celery_distlock.stores.values import Status, Want

from .model import Grant, Key, Member
from .schedules import LEASE

__all__ = ["FIRST", "Request", "RequestedKey"]

FIRST = 1e-6  # the place of one for which its key is kept


class Request(NamedTuple):
    """A request for a key."""

    mode: str
    owner: str
    run: str
    want: Want
    redelivered: bool = False
    retains: bool = False
    most: int = 0

    @property
    def parks(self) -> bool:
        return self.mode in ("park", "line")

    @property
    def member(self) -> str:
        return self.owner if self.mode == "wait" else self.run


class RequestedKey(Key):
    """A key that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[str, Request] = {}  # by owner
        self.wants: dict[str, Want] = {}  # by run
        self.listening: set[str] = set()  # owners
        self.wakes: set[str] = set()  # runs

    def noted(self) -> tuple[Any, ...]:
        woken, self.woken = self.woken, []
        self.wakes.update(each.run for each in woken)
        return tuple(
            (each.run, f"envelope of {each.run}".encode(), each.has_come, each.sent > 0)
            for each in woken
        )

    def ask(self, request: Request) -> Any:
        self.requests[request.owner] = request
        if request.mode == "wait":
            self.listening.add(request.owner)
        if request.mode != "acquire":
            self.wants[request.run] = request.want
        status, *facts = self._answer(request)
        return (status, self.noted(), *facts, *[False] * bool(facts))

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
            if self._may_come(request, grant):
                self._start_again(request, grant)
                granted = self._come(request, grant)
                grant.comes_again |= request.mode == "park" and grant is reserved
                return granted
            self.drop(grant.owner)
            place = place or grant.place or FIRST * self._is_right(request, grant)
        if answer := self._answer_second(request):
            return answer
        if request.mode != "line" and (granted := self._enter(request, place)):
            return self._come(request, granted)
        return self._join(request, place, has_left=reserved is not None)

    def _may_come(self, request: Request, grant: Grant) -> bool:
        """Say whether a holder asks again, or one may claim what is reserved for it."""
        if grant.owner == request.owner and not grant.place:
            return True
        return self._is_right(request, grant) and self._opens(request.want, grant)

    def _is_right(self, request: Request, grant: Grant) -> bool:
        known = self.parked(request.run)
        want = known.want if known else None
        return grant.owner == request.owner or self.suits(grant, request.want, want)

    def _opens(self, want: Want, reserved: Grant) -> bool:
        """Say whether a claim may enter; what was kept since an execution only asks the rates."""
        return self.admits(want, reserved) if reserved.place else self.may_start(want, reserved)

    def _answer_second(self, request: Request, *came: Grant) -> Any:
        """Answer a run that has ended, or for which another owner has the key."""
        run, other = request.run, None if self.is_alone else self.held_by(request.run)
        asks = request.redelivered or (request.parks and not came)
        if not run or (came and self.parked(run)):
            asks = False
        ended, settles = asks and run in self.done, asks and self.settles.get(run, 0.0)
        known = self.parked(run) if came else None
        recalled = (asks and run in self.recalled) or (known is not None and known.recalls == 2)
        recalled = recalled and not self.held_by(run)
        if not (ended or settles > self.now or other or recalled):
            return None
        for grant in came:
            self.drop(grant.owner)
            self.hand_over()
        if request.mode == "wait":
            self.queue.pop(request.owner, None)
        if ended:
            return (Status.DONE,)
        is_held = not settles > self.now
        if is_held and not other:
            return (Status.DONE if request.mode == "line" else Status.RECALLED,)
        if request.parks:
            waiter = self._parked_now(request, self.place_of(run))
            self.defer(waiter, other.ends if other and is_held else settles)
        return (Status.PARKED if request.parks else Status.BUSY, is_held, 0)

    def _enter(self, request: Request, place: float) -> Grant | None:
        """Serve those before the request; grant it the key if it is the next and fits."""
        run, want = request.run, request.want
        is_next = self.make_room(place, want)
        is_straight = want.alone and not self.grants and run in self.flights
        is_next = is_next or (is_straight and not self.is_capped(want))
        is_next = is_next or self.hand_over(request.member, run, place, want)
        if not is_next or not self.admits(want):
            return None
        waited = run in self.queue and run not in self.flights
        waited = waited or (request.mode == "wait" and request.owner in self.queue)
        if waited and self.queue.lanes:
            self.queue.lanes.start(want, self.queue)
        if request.mode == "wait":
            self.queue.pop(request.owner, None)
        grant = self.grant(request.owner, "", want, LEASE)
        self.start(grant, want, place)
        return grant

    def _come(self, request: Request, grant: Grant) -> Any:
        self._take(request, grant)
        if not request.want.alone or grant.slot >= 0:
            self.hand_over()
        return (Status.GRANTED, grant.slot)

    def _start_again(self, request: Request, grant: Grant) -> None:
        """Count the start of a repeated request of a holder now, not when it was granted."""
        if grant.owner == request.owner and not grant.place and grant.started:
            at, terms = grant.started
            self.starts.take_back(terms, at)
            grant.started = None
            self.start(grant, request.want)

    def _take(self, request: Request, grant: Grant) -> None:
        """Make the owner the holder of a grant."""
        if grant.place or grant.is_reserved or (request.want.rates and not grant.started):
            self.start(grant, request.want)
        for owner in (grant.owner, f"parked:{request.run}"):
            self.drop(owner)
        known = self.parked(request.run)
        asked = False  # to leave when it begins
        if known and (grant.owner != request.owner or grant.run != request.run):
            grant.comes_again |= known.may_be_twice
            asked = known.recalls == 1
            self.forget(request.run)
            if request.retains:
                is_new = known.is_deferred or not known.due
                due = self.now + LEASE if is_new else known.due
                self.flights[request.run] = replace(
                    known, due=due, sent=0, has_come=True, is_deferred=True
                )
        grant.ends = max(0.0 if grant.is_reserved else grant.ends, self.now + LEASE)
        grant.owner, grant.run, grant.place = request.owner, request.run, 0.0
        self.grants[request.owner] = grant
        if asked:
            self.recall(request.run)

    def _parked_now(self, request: Request, place: float) -> Member:
        run, known = request.run, self.parked(request.run)
        recalls = 2 if run in self.recalled else known.recalls if known else 0
        return Member(place, run, "", request.want, was_delivered=True, recalls=recalls)

    def _join(self, request: Request, place: float, *, has_left: bool = False) -> Any:
        """Put one that has to wait into the queue, or back into it."""
        place = place or self.new_place(request.want)
        if request.parks and self.is_full(request.run, request.most):
            return (Status.FULL, bool(self.grants), 0)
        if request.parks:
            waiter = self._parked_now(request, place)
            self.forget(request.run)
            self.queue[request.run] = waiter
        elif request.mode == "wait":
            waiter = Member(place, "", request.owner, request.want)
            self.queue.setdefault(request.owner, waiter)
        elif has_left and request.run in self.flights:
            self.queue.setdefault(request.run, replace(self.flights[request.run]))
        line = self.line()
        at = line.index(request.member) if request.member in line else len(line)
        return (Status.PARKED if request.parks else Status.BUSY, bool(self.grants), at)

    def reaches(self, owner: str, run: str, want: Want, *, claims: bool) -> bool:
        """Say whether the key may be taken with others now."""
        if owner in self.grants:
            return True
        if not claims:
            return not (self.queue or self.held_by(run)) and self.admits(want)
        reserved = self.grants.get(f"parked:{run}")
        if not reserved or (not self.parked(run) and (run in self.done or run in self.settles)):
            return False
        is_enough = self.suits(reserved, want, want)
        return is_enough and self._opens(want, reserved)

    def take_with_others(self, request: Request) -> Any:
        """Take the key, which is in reach."""
        self.requests[request.owner] = request._replace(redelivered=False, retains=False)
        grant = self.grants.get(request.owner)
        if grant:
            grant.ends = max(grant.ends, self.now + LEASE)
            self._start_again(request, grant)
        elif request.redelivered:
            grant = self.grants[f"parked:{request.run}"]
            self._take(request, grant)
        else:
            grant = self.grant(request.owner, request.run, request.want, LEASE)
            self.start(grant, request.want)
        return (Status.GRANTED, (), grant.slot, False)
