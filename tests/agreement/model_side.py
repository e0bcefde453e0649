"""A model as one side of a comparison: it plays a schedule and says what callers see."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_distlock import clock
from celery_distlock.stores.values import ALONE, Completion, Limit, RenewOutcome, Status

from .model import CLAIM, STRICT, UNSENT, Grant, Member
from .model_calls import CalledKey
from .model_requests import FIRST, Request
from .schedules import LEASE

if TYPE_CHECKING:
    from .schedules import Step

__all__ = ["ModelSide"]

RESEND = 60.0  # seconds, doubled each time


class _Key(CalledKey):
    """A key that answers the steps of a schedule."""

    def play(self, step: Step) -> Any:
        """Answer a step that is for this key."""
        self.begin()
        facts = step.facts if step.facts[0] in self.requests else step.facts[1:]
        if step.verb == "line":
            run, want, *most = facts
            return self.ask(Request("line", "", run, want, most=sum(most)))
        if step.verb == "park":
            owner, run, want, redelivered, *most = facts
            return self.ask(Request("park", owner, run, want, redelivered, most=sum(most)))
        if step.verb in ("acquire", "wait"):
            return self.ask(Request(step.verb, *facts))
        if step.verb == "send":
            return self.send(*facts)
        return getattr(self, f"_{step.verb}")(*facts)

    def begin(self) -> None:
        """Take back what has lapsed."""
        self.now = round(clock.monotonic(), 6)
        self.micros = round(clock.wall() * 1e6)
        self.starts.begin(self.micros)
        for name in [name for name, each in self.grants.items() if each.ends <= self.now]:
            self.drop(name)

    # Requests for the key

    def _claim(self, owner: str, run: str, retains: bool) -> Any:
        if run not in self.wakes:
            return None
        return self.ask(Request("acquire", owner, run, self.wants[run], True, retains))

    def _again(self, owner: str) -> Any:
        request = self.requests[owner]
        return None if request.mode == "wait" and owner not in self.listening else self.ask(request)

    # Requests of an owner

    def _release(self, owner: str, ended: Completion, keep: str, begun: bool) -> Any:
        grant = self.grants.get(owner)
        if grant and grant.started and self.requests[owner].want.rates and not begun:
            at, terms = grant.started
            self.starts.take_back(terms, at)
        self._complete(self.requests[owner].run, ended, grant)
        waited = self.queue.pop(owner, None)
        self.listening.discard(owner)
        self.called.discard(owner)
        if grant and keep and self._keeps(keep, owner):
            self.drop(owner)
            self._keep(keep, grant)
            return (True, self.noted())
        self.drop(owner)
        if grant or waited:
            self.hand_over()
        woken = self.noted()
        return (grant is not None or bool(woken), woken)

    def _keeps(self, run: str, owner: str) -> bool:
        """Say whether the key is kept for a run, and not served to it, or to others."""
        if run in self.queue:
            for where in (self.queue, self.flights):
                if run in where:
                    where[run].place = FIRST
            if self.queue.lanes:
                self.queue.lanes.enter_first(self.queue[run])
            return False
        held = None if self.is_alone else self.held_by(run)
        return not held or held.owner == owner

    def _keep(self, run: str, grant: Grant) -> None:
        self.drop(f"parked:{run}")
        grant.owner, grant.run, grant.place, grant.started = f"parked:{run}", run, 0.0, None
        grant.ends, grant.before, grant.upgrades = self.now + LEASE, None, False
        grant.is_recalled = False
        self.grants[grant.owner] = grant

    def _complete(self, run: str, ended: Completion, grant: Grant | None) -> None:
        """Note what became of a run; its end, if another message of it may arrive."""
        held, known = self.held_by(run), self.parked(run)
        is_stored = self.settles.get(run, 0.0) > self.now
        if run and ended is Completion.UNSETTLED:
            self.settles[run] = max(held.ends if held else 0.0, self.now + CLAIM)
            if known:
                self.defer(known, self.settles[run])
        elif run and ended is not Completion.NO:
            grant = grant or held
            comes_again = grant is not None and grant.comes_again
            if known or comes_again or ended is Completion.YES_AND_MAY_COME_AGAIN:
                self.end(run)
        elif held and known and known.is_deferred and not (self.is_alone or is_stored):
            known.due = self.now

    def _renew(self, owner: str) -> Any:
        if owner not in self.grants:
            return RenewOutcome.HELD if self.is_alone else RenewOutcome.LOST
        grant = self.grants[owner]
        grant.ends = max(grant.ends, self.now + LEASE)
        return RenewOutcome.RECALLED if grant.is_recalled else RenewOutcome.RENEWED

    def _recall(self, owner: str) -> bool:
        grant = self.grants.get(owner)
        if grant:
            grant.is_recalled = True
        return grant is not None

    def _change(self, owner: str, how: str, waits: bool) -> Any:
        if waits and how == "upgrade":
            self.listening.add(owner)
        grant = self.grants.get(owner)
        if not grant or (how == "upgrade" and grant.place):
            return (Status.FREE, (), -1)
        status = getattr(self, f"_{how}")(grant, waits)
        return (status, self.noted(), grant.slot if status is Status.GRANTED else -1)

    def _upgrade(self, grant: Grant, waits: bool) -> Status:
        if grant.units and len(self.grants) > 1:
            if any(each.upgrades for each in self.grants.values() if each is not grant):
                return Status.DEADLOCK
            grant.upgrades |= waits
            return Status.BUSY
        if grant.units:
            self.upgrade(grant)
        grant.ends = max(grant.ends, self.now + LEASE)
        return Status.GRANTED

    def _downgrade(self, grant: Grant, _: bool) -> Status:
        if not grant.units:
            self.downgrade(grant)
            grant.ends = max(grant.ends, self.now + LEASE)
        grant.upgrades = False
        self.hand_over()
        return Status.GRANTED

    def _rest(self, owner: str) -> Any:
        self.rest = self.now + LEASE if owner in self.grants else self.rest
        return owner in self.grants

    # What operators, workers and sweeps do

    def _limit(self, limit: Limit | None, lane: str | None) -> Any:
        if lane is None:
            self.limit = limit
        elif limit:
            self.lane_limits[lane] = limit
        else:
            self.lane_limits.pop(lane, None)
        self.hand_over()
        return self.noted()

    def _woken(self, run: str, what: str, mark: bool) -> Any:
        if run not in self.wakes:
            return None
        if what == "drop":
            unended = (run in self.settles or run in self.recalled) and run not in self.done
            is_known = unended or f"parked:{run}" in self.grants or run in self.flights
            return self._removed(run, is_known=is_known, mark=mark)
        if flight := self.flights.get(run):
            flight.sent, flight.with_broker = flight.sent + 1, True
            flight.may_be_twice |= flight.sent > 1
            flight.due = self.now + RESEND * 2 ** (flight.sent - 1)
            if what == "mark_returned":
                self.settles.pop(run, None)
                flight.due, flight.sent, flight.with_broker = 0.0, 0, False
        return None

    def _cancel(self, run: str) -> Any:
        may_run = self.held_by(run) or run in self.settles
        if self.parked(run) and not may_run:
            self.times.pop(run, None)
            self.call = None if self.call and self.call.run == run else self.call
        return self._removed(run, is_known=bool(self.parked(run) and not may_run), mark=True)

    def _removed(self, run: str, *, is_known: bool, mark: bool) -> Any:
        if is_known:
            self.forget(run)
            if mark:
                self.end(run)
            self.drop(f"parked:{run}")
            self.hand_over()
        return (is_known, self.noted())

    def _sweep(self) -> Any:
        for run, flight in sorted(self.flights.items(), key=lambda each: (each[1].due, each[0])):
            if flight.due <= self.now:
                self._look_for(run, flight)
        for run, due in sorted(self.times.items(), key=lambda each: each[1]):
            if due <= self.now:
                if run in self.delayed:
                    self.line_up(self.delayed[run])
                del self.times[run]
        if not self.queue:
            self.queue.lanes = None
        self.hand_over()
        may_recall = self.call and self.call.recalls and self.held_by(self.call.run)
        self.call = self.call if self.bearer() or may_recall else None
        return [(each,) for each in self.noted()]

    def _look_for(self, run: str, flight: Member) -> None:
        """Find a run again that is in flight and has not come."""
        reserved = self.grants.get(f"parked:{run}")
        if reserved and flight.want.strict:
            reserved.ends = max(reserved.ends, self.now + STRICT)
        if held := self.held_by(run):
            flight.due = flight.due and held.ends
        elif run in self.queue and not flight.with_broker:
            del self.flights[run]
        else:
            self.woken.append(replace(flight))
            flight.due, flight.is_deferred = self.now + UNSENT, False
            flight.may_be_twice |= not flight.sent

    def _look(self) -> Any:
        holders = sorted((g.owner, g.run, g.units, g.slot) for g in self.grants.values())
        one, holders = (holders[0][:2], []) if self.is_alone else (("", ""), holders)
        limit = self.limit and (self.limit.capacity, self.limit.author)
        used, capacity = sum(each[2] for each in holders), self.capacity if holders else 1
        several = used, capacity, limit, self.rest > self.now, self.starts.counted(self.micros)
        bearer = self._seen_bearer()
        times, is_held = (True, int(bearer is not None)), bool(self.grants)
        state = (one, times, is_held, len(self.queue), holders, several)
        woken = [("", run, True, ALONE) for run in self.flights if not self.held_by(run)]
        line = [self.queue[name] for name in self.line()]
        queued = [(each.owner, each.run, False, each.want) for each in line]
        return (state, (sorted(woken), queued), bearer)

    def _seen_bearer(self) -> Any:
        if (bearer := self.bearer()) is None:
            return None
        more = bearer.silent, bearer.fixed, bearer.lasts > 0
        return (*bearer[:2], bearer.expires < 1e9, *more)


class ModelSide:
    """See the module."""

    def __init__(self, *, hears: bool = True) -> None:
        self._keys = {"a": _Key(), "b": _Key()}
        self._hears = hears

    def play(self, step: Step) -> Any:
        """Return what callers see of a store that does as guaranteed."""
        if step.verb == "both":
            return self._both(*step.facts)
        first = step.facts[0]
        keys = [key for name, key in self._keys.items() if first == name or first in key.requests]
        if not keys:
            return None  # time passes, or an owner has asked for nothing
        answer = keys[0].play(step)
        if step.verb != "look":
            return answer
        called = sorted(
            owner for key in self._keys.values() for owner in key.called - key.queue.keys()
        )
        for key in self._keys.values():
            key.called.clear()
        return (*answer, called if self._hears else [])

    def _both(
        self, one: str, other: str, run: str, wants: Any, redelivered: bool, retains: bool
    ) -> Any:
        keys, claims = list(self._keys.values()), redelivered and bool(run)
        for key in keys:
            key.begin()
        asked = list(zip(keys, (one, other), wants, strict=True))
        if not all(key.reaches(owner, run, want, claims=claims) for key, owner, want in asked):
            return None
        return [
            key.take_with_others(Request("acquire", owner, run, want, claims, retains))
            for key, owner, want in asked
        ]

    def close(self) -> None:
        """Nothing is open."""
