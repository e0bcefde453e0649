"""A model of calls that go through the store: delays, and identities that mark duplicates."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from celery_distlock.stores.queue_parts import Bearer, Sent, Where

from .model import Member
from .model_rates import Terms, counts_for
from .model_requests import RequestedKey

if TYPE_CHECKING:
    from celery_distlock.stores.requests import Identity
    from celery_distlock.stores.values import Want

__all__ = ["CalledKey"]


class Call(NamedTuple):
    """A run that was sent with an identity, and its terms; times are absolute."""

    run: str
    until: str | float
    first: float | None
    expires: float
    silent: bool
    fixed: bool
    recalls: bool

    @classmethod
    def of(cls, identity: Identity, run: str, now: float, first: float | None = None) -> Self:
        """Return what is noted now; *first* is when the run was sent first, if it was before."""
        until = identity.until if isinstance(identity.until, str) else now + identity.until
        first = None if identity.most is None else now if first is None else first
        expires = now + identity.expires
        marks = identity.silent, identity.fixed, bool(identity.recalls)
        return cls(run, until, first, expires, *marks)


class CalledKey(RequestedKey):
    """A key for which tasks are sent through the store."""

    def __init__(self) -> None:
        super().__init__()
        self.call: Call | None = None  # the identity that schedules use
        self.max_waiting = 0  # that may wait, for the call that is being answered; 0: any number

    def bearer(self) -> Bearer | None:
        """Return the run that has the identity now."""
        if (call := self.call) is None:
            return None
        left = call.until - self.now if isinstance(call.until, float) else 0.0
        lasts = left > 0 or call.until == "finished"
        known = self.parked(call.run)
        if self.held_by(call.run):
            where = Where.RUNNING if lasts else None
        elif known and call.expires > self.now and self.settles.get(call.run, 0.0) <= self.now:
            is_coming = known.was_delivered or call.run in self.flights
            where = Where.COMING if is_coming else Where.WAITING
        else:
            where = Where.ENDED if left > 0 else None
        expires = call.expires - self.now
        return where and Bearer(call.run, where, expires, call.silent, call.fixed, max(0.0, left))

    def send(
        self,
        run: str,
        want: Want,
        delay: float,
        identity: Identity | None,
        paced: bool,
        most: int = 0,
    ) -> Any:
        """Answer a call: it is dispatched, queued, delayed, or there already."""
        self.wants[run] = want
        bearer, self.max_waiting = self.bearer(), 0 if delay else most
        delay = max(delay, self._pace(want) if paced else 0.0)
        if not identity:
            sent = self._accept(run, want, delay, paced=paced)
        elif identity.replaces == run:
            waits = bearer and bearer.run == run and bearer.where is Where.WAITING
            sent = self._update(run, want, delay, identity) if waits else Sent.CHANGED
        elif self._is_free(bearer, identity, run):
            sent = self._accept(run, want, delay, identity, paced=paced)
        else:
            is_left = identity.replaces == "*"
            sent = self._accept(run, want, delay, paced=paced) if is_left else Sent.CHANGED
        self.wakes |= {run} if sent is Sent.GO else set()
        return (sent, self.noted(), sent is Sent.FULL and bool(self.grants))

    def _is_free(self, bearer: Bearer | None, identity: Identity, run: str) -> bool:
        """Say whether a run may take the identity."""
        if bearer is None or bearer.run == run:
            return True
        is_replaced = bearer.where is not Where.WAITING or identity.beside
        return bearer.run == identity.replaces and is_replaced

    def _accept(
        self, run: str, want: Want, delay: float, identity: Identity | None = None, *, paced: bool
    ) -> Sent:
        """Add a run, unless it is there."""
        if self.held_by(run):
            return Sent.QUEUED
        if self.parked(run):
            if run in self.flights and f"parked:{run}" in self.grants:
                return Sent.GO
            return Sent.LATER if run in self.delayed else Sent.QUEUED
        if self.is_full(run, self.max_waiting):
            return Sent.FULL
        self.done.discard(run)
        self.recalled.discard(run)
        for where in (self.settles, self.times):
            where.pop(run, None)
        self.drop(f"parked:{run}")
        if identity and identity.recalls:
            self._recall_earlier(run, identity)
        self.call = Call.of(identity, run, self.now) if identity else self.call
        if delay or (paced and any(each <= self.now for each in self.times.values())):
            self.times[run] = self.now + delay
            self.delayed[run] = Member(0.0, run, "", want)
            return Sent.LATER
        self.line_up(Member(0.0, run, "", want))
        return self._let_in(run, Sent.QUEUED)

    def _recall_earlier(self, run: str, identity: Identity) -> None:
        """Ask the run to leave that has the identity, or had it until it began."""
        before = self.call
        if before and before.run != run and (identity.recalls == "all" or not before.fixed):
            self.recall(before.run)

    def _update(self, run: str, want: Want, delay: float, identity: Identity) -> Sent:
        """Replace the message and the want of a run that waits, and perhaps when it joins."""
        if known := self.parked(run):
            known.want = want
        first = self.call.first if self.call else None
        self.call = Call.of(identity, run, self.now, first)
        if run in self.times:
            most = math.inf if first is None or identity.most is None else identity.most
            self.times[run] = due = min(self.now + delay, (first or 0.0) + most)
            if due > self.now:
                return Sent.UPDATED
            del self.times[run]
            if run in self.delayed:
                self.line_up(self.delayed[run])
        return self._let_in(run, Sent.UPDATED)

    def _let_in(self, run: str, sent: Sent) -> Sent:
        """Serve the waiters; the caller itself sends its run if that is served."""
        self.hand_over()
        others = [each for each in self.woken if each.run != run]
        if others != self.woken:
            self.woken, sent = others, Sent.GO
            self.flights[run].with_broker = True
        return sent

    def _pace(self, want: Want) -> float:
        """Return in how many seconds the rates allow a start."""
        own, terms = Terms(want.cost, want.rates), self.terms(want)
        opens = [self.starts.opens_in(each, self.micros) for each in (own, terms) if each]
        most = max((counts_for(rate.microseconds) for rate in want.rates), default=0)
        return min(*opens, most, most) / 1e6
